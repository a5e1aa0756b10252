"""One job from the start of its processes to the end of the last: agents' events to the policy, its decisions to the agents.

The one loop waits for reports of agents, for signals to the launcher and for a few deadlines. In every case, no process of the
job is left at its end.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from horovod.runner import open_files
from horovod.runner.agent.agent_processes import STREAMS
from horovod.runner.agent.base import Agent
from horovod.runner.agent.grace_period import GRACE_SECONDS
from horovod.runner.agent.messages import (
    AgentEvent,
    Closed,
    Ended,
    Exit,
    InputConsumed,
    Lost,
    NotStarted,
    OutputData,
    ProcessPlan,
    Signalled,
    Stopped,
)
from horovod.runner.errors import LaunchError
from horovod.runner.event_loop import Loop
from horovod.runner.output import standard_input
from horovod.runner.output.outcome import Outcome, ReportedFailure
from horovod.runner.output.output import JobOutput, RankStream, ReaderGone
from horovod.runner.output.tracebacks import HOLD_SECONDS
from horovod.runner.policy import Decisions, EndAll, LookAtAll, Policy, Say, Wake
from horovod.runner.signals import SecondSignal, SignalPipe

_PROMPT_SECONDS = 0.05
"""How long the rank that reads standard input may pause within a line before the line counts as a prompt."""
_LOOK_SECONDS = 1.0
"""How long the agents may take to report which processes are stopped."""
_SWEEP_SECONDS = 4.0
"""How long, after the grace period, an agent may take to report that it has ended everything."""

Plans = tuple[Mapping[str, str], Sequence[ProcessPlan]]
"""The environment variables of all processes of a host, and the processes."""


class Supervisor:
    """One job's processes. Its :meth:`report` is for the agents, which are added before :meth:`run`.

    Args:
        loop: calls this object when something happens.
        output: where the ranks' output goes.
        policy: decides what follows from each event.
        locations: where ranks run, for messages: "localhost, local rank 1".
        reported_failure: returns what the runtime has reported about the first failing rank, if anything.
        departed: called for every rank that has ended, before the policy is called.
        signals: where signals to the launcher arrive; None leaves them to Python.
        reader: the rank that reads this process's standard input, or None.
    """

    def __init__(
        self,
        loop: Loop,
        output: JobOutput,
        policy: Policy,
        *,
        locations: Mapping[int, str],
        reported_failure: Callable[[], ReportedFailure | None],
        departed: Callable[[int, Exit], None],
        signals: SignalPipe | None = None,
        reader: int | None = None,
    ) -> None:
        self._loop = loop
        self._output = output
        self._policy = policy
        self._locations = locations
        self._reported_failure = reported_failure
        self._departed = departed
        self._signals = signals
        self._reader = reader
        if signals is not None:
            signals.passes_interrupts_on = reader is not None and standard_input.is_terminal()
        self._agents: list[Agent] = []
        self._home: dict[int, Agent] = {}  # where each rank runs
        self._streams: dict[tuple[int, str], RankStream] = {}  # those that are still open
        self._tails: dict[int, RankStream] = {}
        self._immortal: dict[str, list[int]] = {}
        self._input = standard_input.Forwarder(loop)
        self._looking: set[Agent] = set()  # agents that have not said yet which processes are stopped
        self._stopped: set[int] = set()
        self._refusal = ""  # why a process could not be started

    def run(self, agents: Sequence[Agent], plans: Callable[[], Sequence[Plans]], seconds: float) -> Outcome:
        """Run the job to its end.

        Args:
            agents: one for each host; they report to :meth:`report`.
            plans: returns what to start on each host; called once all agents are ready.
            seconds: how long the agents may take to get ready.

        Raises:
            LaunchError: a host cannot take part, or a process could not be started; processes that had started have been ended.
            SecondSignal: a second signal came; everything has been killed.
        """
        self._agents = list(agents)

        def begin() -> None:
            self._await_agents(seconds)
            if not self._policy.ending:
                for agent, (environment, processes) in zip(agents, plans(), strict=True):
                    self._start(agent, environment, processes)

        return self._supervise(begin)

    def _supervise(self, begin: Callable[[], None]) -> Outcome:
        """Start the job with ``begin()``, and supervise it until it ends."""
        grace = GRACE_SECONDS
        try:
            try:
                if self._signals is not None:
                    self._loop.watch(self._signals.fileno(), self._on_signals)
                    self._signals.may_raise = True
                begin()
                self._loop.run(self._finished)
            finally:
                if self._signals is not None:
                    self._signals.may_raise = False  # from here on everything ends soon, and must not be interrupted
            if self._refusal:
                raise LaunchError(self._refusal)
        except BaseException as error:
            grace = 0 if isinstance(error, SecondSignal) else GRACE_SECONDS
            self._policy.ending = True
            raise
        finally:
            self._close(grace)
        return self._outcome()

    def report(self, agent: Agent, event: AgentEvent) -> None:
        """Called by agents with what has happened."""
        if isinstance(event, OutputData):
            self._show(event.process, event.stream, event.data)
        elif isinstance(event, Ended):
            self._on_end(event.process, event.exit)
        elif isinstance(event, NotStarted):
            self._refusal = self._refusal or event.reason
        elif isinstance(event, Closed):
            self._immortal[agent.name] = event.immortal
        elif isinstance(event, Stopped):
            self._stopped.update(event.processes)
            self._has_looked(agent)
        elif isinstance(event, Signalled):
            self._do(self._policy.signalled(event.number))
        elif isinstance(event, Lost):
            self._on_lost(agent, event.reason)
        elif isinstance(event, InputConsumed):
            self._input.pass_on(agent, event.process)

    def _await_agents(self, seconds: float) -> None:
        def known() -> bool:
            return self._policy.ending or all(agent.facts or agent.closed for agent in self._agents)

        self._loop.run(known, time.monotonic() + seconds)
        missing = [agent for agent in self._agents if agent.facts is None or agent.closed]
        if missing and not self._policy.ending:
            width = max(len(agent.name) for agent in missing)
            lines = [
                f"  {agent.name:{width}}  {agent.trouble or f'it has not answered within {seconds:.3g} seconds'}"
                for agent in missing
            ]
            number, size = len(missing), len(self._agents)
            which = f"{number} of {size} hosts cannot" if size > 1 else "the host cannot"
            raise LaunchError("\n".join([f"{which} take part in this job:", *lines]))

    def _start(self, agent: Agent, environment: Mapping[str, str], processes: Sequence[ProcessPlan]) -> None:
        open_files.make_room(
            open_files.RANK * len(processes), f"the launcher for {len(processes)} ranks on {agent.name}"
        )
        for plan in processes:
            self._home[plan.number] = agent
            for name in STREAMS:
                stream = self._streams[plan.number, name] = self._output.stream(plan.number, name)
                if name == "stderr":
                    self._tails[plan.number] = stream
        agent.start(environment, processes)

    def _finished(self) -> bool:
        if self._refusal:
            return True
        if self._policy.ending:
            return all(agent.closed for agent in self._agents)
        return not self._streams and not self._policy.running and not self._policy.undecided

    def _close(self, grace: float) -> None:
        """Have every agent end what is left of its processes: nothing, if all went well."""
        try:
            for agent in list(self._agents):  # one that has nothing to end leaves the list at once
                agent.end(grace, hunt=self._policy.ending)
            deadline = time.monotonic() + grace + _SWEEP_SECONDS
            self._loop.run(lambda: all(agent.closed for agent in self._agents), deadline)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill what is left, and release all agents. Idempotent, since an exception may come at any moment."""
        self._input.stop()
        for agent in list(self._agents):
            agent.kill()
        while self._streams:
            try:
                self._streams.popitem()[1].finish()
            except ReaderGone:
                pass

    # Reports of agents and the loop.

    def _show(self, rank: int, name: str, data: bytes) -> None:
        stream = self._streams.get((rank, name))
        if stream is None:
            return
        held = stream.holds
        if data:
            self._write(partial(stream.feed, data))
        else:
            del self._streams[rank, name]
            self._write(stream.finish)
        if stream.holds and not held:
            self._loop.after(("traceback", rank), HOLD_SECONDS, partial(self._write, stream.release))
        if rank == self._reader:
            self._expect_prompt(rank, name)

    def _write(self, act: Callable[[], None]) -> None:
        """Have a stream write; its reader may have gone."""
        try:
            act()
        except ReaderGone:
            self._do(self._policy.reader_gone())

    def _expect_prompt(self, rank: int, name: str) -> None:
        """Show the part of a line that is not completed soon: it may be a prompt that waits for an answer."""
        stream = self._streams.get((rank, name))
        if stream is None or not stream.incomplete:
            self._loop.cancel(("prompt", name))
            return
        self._loop.after(("prompt", name), _PROMPT_SECONDS, partial(self._write, stream.show_incomplete))

    def _on_end(self, rank: int, end: Exit) -> None:
        self._departed(rank, end)
        if rank == self._reader and self._signals is not None:
            self._signals.passes_interrupts_on = False
        self._do(self._policy.ended(rank, end, self._reported_failure()))

    def _on_lost(self, agent: Agent, reason: str) -> None:
        for rank in sorted(rank for rank, home in self._home.items() if home is agent):
            for name in STREAMS:
                self._show(rank, name, b"")
            if rank in self._policy.running:
                self._on_end(rank, Exit(255, reason=reason))
        self._has_looked(agent)

    def _on_signals(self) -> None:
        assert self._signals is not None
        for number in self._signals.take():
            if number == signal.SIGTSTP:
                self._suspend()
            elif number == signal.SIGURG:
                self._signal_all(number)  # every rank writes down what it does
            elif number == signal.SIGINT and self._signals.passes_interrupts_on and not self._signals.pressed:
                assert self._reader is not None
                self._do(self._policy.interrupt_passed_on())
                self._home[self._reader].signal(signal.SIGINT, [self._reader])
            else:
                self._do(self._policy.signalled(number))

    def _suspend(self) -> None:
        """Stop all ranks and this process, and have the ranks continue when this process does."""
        assert self._signals is not None
        self._signal_all(signal.SIGSTOP)
        self._signals.suspend()
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        for agent in list(self._agents):
            agent.signal(number, [rank for rank, home in self._home.items() if home is agent])

    # How decisions are carried out.

    def _do(self, decisions: Decisions) -> None:
        for decision in decisions:
            self._carry_out(decision)

    def _carry_out(self, decision: tuple[object, ...]) -> None:
        if isinstance(decision, Say):
            self._output.say(decision.text)
        elif isinstance(decision, Wake):
            self._loop.after(("policy", decision.reason), decision.seconds, partial(self._wake, decision.reason))
        elif isinstance(decision, LookAtAll):
            self._look()
        elif isinstance(decision, EndAll):
            for agent in list(self._agents):  # as in _close
                agent.end(decision.grace, hunt=True)
            self._loop.after("overdue", decision.grace + _SWEEP_SECONDS, self._give_up)

    def _look(self) -> None:
        """Have the agents report which processes are stopped. A host that does not answer in time has none."""
        self._looking = {agent for agent in self._agents if not agent.closed}
        self._loop.after("looking", _LOOK_SECONDS, self._looked)
        for agent in list(self._looking):
            agent.look()

    def _has_looked(self, agent: Agent) -> None:
        if agent in self._looking:
            self._looking.discard(agent)
            if not self._looking:
                self._looked()

    def _looked(self) -> None:
        self._looking.clear()
        self._loop.cancel("looking")
        self._do(self._policy.looked(frozenset(self._stopped), self._reported_failure()))

    def _give_up(self) -> None:
        """End without the agents that do not answer: they are stopped, or their hosts have just become unreachable."""
        for agent in list(self._agents):
            if not agent.closed:
                agent.kill()

    def _wake(self, reason: str) -> None:
        self._do(self._policy.woken(reason, self._reported_failure()))

    def _outcome(self) -> Outcome:
        exits, first_failure, interrupted = self._policy.exits, self._policy.first_failure, self._policy.interrupted
        immortal = frozenset(pid for pids in self._immortal.values() for pid in pids)
        unheard = [agent.name for agent in self._agents if agent.unheard]
        if first_failure is None:
            return Outcome(exits, interrupted=interrupted, immortal=immortal, unheard=unheard)
        reported = self._reported_failure()  # the other ranks may have reported the failure only after that rank's end
        known = reported.reason if reported is not None and reported.rank == first_failure.culprit else ""
        last_words = self._tails.get(first_failure.culprit)  # none of a process that could not be started
        return Outcome(
            exits,
            culprit=first_failure.culprit,
            exit=first_failure.exit,
            victim=None if first_failure.ended == first_failure.culprit else first_failure.ended,
            location=self._locations[first_failure.culprit],
            reason=first_failure.reason or known,
            reader=self._reader,
            tail=() if last_words is None else tuple(last_words.tail),
            interrupted=interrupted,
            immortal=immortal,
            unheard=unheard,
        )
