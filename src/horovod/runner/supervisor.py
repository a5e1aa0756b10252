"""Runs the processes of one job from start to end, in one loop that waits and never polls.

The loop waits for the ranks' output, for their ends, for signals to the launcher and for its own few deadlines. Phases:
start all; run; on the first failure find out whose it was; let the others say what they saw of it; ask everybody to end;
after a grace make them; sweep up.
Whatever way the loop is left, no process of the job stays behind.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from horovod.runner import process_tree, standard_input
from horovod.runner.guardian import Guardian
from horovod.runner.outcome import Failure, Outcome
from horovod.runner.output import Output, RankStream, ReaderGone
from horovod.runner.process_tree import GRACE_SECONDS
from horovod.runner.processes import STREAMS, Exit, ProcessPlan, RankProcess
from horovod.runner.signals import Insisted, SignalPipe

_JUDGE_SECONDS = 1.0
"""How long to wait for the end of the rank that others accuse, before everybody is ended."""
_LAST_WORDS_SECONDS = 1.0
"""How long ranks that still run have, after the first failure, to end by themselves: the runtime has told them of it, so
they raise, say where they were, and let go of what they hold."""
_GIVE_UP_SECONDS = 0.5
"""How long after SIGKILL a process may still show up as running."""
_PROMPT_SECONDS = 0.05
"""How long the rank that reads standard input may pause within a line until the line is taken for a prompt."""
_LAST_CHUNKS = 16
"""Reads from a pipe that does not end; it holds no more, unless somebody keeps writing."""


@dataclass(frozen=True)
class _Verdict:
    culprit: RankProcess
    ended: RankProcess  # whose exit code tells of it: the culprit's own, or its first victim's
    end: Exit
    reason: str


class Supervisor:
    """One job's processes.

    Args:
        plans: what to start; in the order of ranks.
        output: where the ranks' output goes.
        mark: what every process of the job has in its environment, and no other process.
        guardian: who ends the job if this process dies.
        accusation: asks what is known about the first failing rank beside how it ended, if anything.
        departed: is told of every rank that has ended, before anything is concluded from it.
        signals: where signals to the launcher arrive; None leaves them to Python.
        reader: the rank that reads this process's standard input, or None.
    """

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        output: Output,
        *,
        mark: bytes,
        guardian: Guardian | None,
        accusation: Callable[[], Failure | None],
        departed: Callable[[int, Exit], None],
        signals: SignalPipe | None = None,
        reader: int | None = None,
    ) -> None:
        self._plans = plans
        self._output = output
        self._mark = mark
        self._guardian = guardian
        self._accusation = accusation
        self._departed = departed
        self._signals = signals
        self._reader = reader
        self._passed_interrupt_on = False
        if signals is not None:
            signals.passes_interrupts_on = reader is not None and standard_input.is_terminal()
        self._selector = selectors.DefaultSelector()
        self._timers: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._streams: dict[tuple[int, str], RankStream] = {}  # those that are still open
        self._tails: dict[int, RankStream] = {}
        self._first_failed: RankProcess | None = None  # the first rank that ended badly by itself
        self._verdict: _Verdict | None = None
        self._ending = False
        self._interrupted = 0
        self._kill_at: float | None = None  # when patience with an ending job ends
        self._given_up = False

    def run(self) -> Outcome:
        """Run the job to its end.

        Raises:
            LaunchError: a process could not be started; those that were have been ended.
            Insisted: a second signal came; everything has been killed.
        """
        immortal: set[int] = set()
        try:
            if self._signals is not None:
                self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
            for plan in self._plans:
                self._start(plan)
            while not self._finished():
                for key, _ in self._selector.select(self._time_left()):
                    key.data()
                self._run_timers()
        except BaseException as error:
            self._ending = True
            self._kill_at = time.monotonic() + (0 if isinstance(error, Insisted) else GRACE_SECONDS)
            raise
        finally:
            immortal = self._sweep()
        return self._outcome(immortal)

    def _start(self, plan: ProcessPlan) -> None:
        rank = RankProcess(plan, reads_input=plan.rank == self._reader)
        self._ranks[plan.rank] = rank
        if self._guardian is not None:
            self._guardian.watch_over(rank.session)
        self._selector.register(rank.ended, selectors.EVENT_READ, partial(self._on_end, rank))
        for name in STREAMS:
            stream = self._output.stream(plan.rank, name)
            self._streams[plan.rank, name] = stream
            if name == "stderr":
                self._tails[plan.rank] = stream
            self._selector.register(rank.descriptor(name), selectors.EVENT_READ, partial(self._read, rank, name))

    def _finished(self) -> bool:
        return self._given_up or (not self._streams and not self._running())

    def _running(self) -> int:
        """How many ranks have not ended."""
        return sum(rank.exit is None for rank in self._ranks.values())

    # What the loop hears.

    def _read(self, rank: RankProcess, name: str) -> bool:
        """Pass on what has arrived; False if there is no more to come."""
        stream = self._streams.get((rank.rank, name))
        if stream is None:
            return False  # closed by an event just before this one
        data = rank.read(name)
        if data is None:
            return False  # nothing at the moment
        try:
            if data:
                stream.feed(data)
            else:
                del self._streams[rank.rank, name]
                self._selector.unregister(rank.descriptor(name))
                rank.close(name)
                stream.finish()
        except ReaderGone:
            self._on_reader_gone()
        if rank.rank == self._reader:
            self._expect_prompt(rank.rank, name)
        return bool(data)

    def _expect_prompt(self, rank: int, name: str) -> None:
        """Show the part of a line that is not completed soon: somebody may be asked to answer it."""
        stream = self._streams.get((rank, name))
        if stream is None or not stream.incomplete:
            self._timers.pop(("prompt", name), None)
            return

        def show() -> None:
            try:
                stream.show_incomplete()
            except ReaderGone:
                self._on_reader_gone()

        self._timers["prompt", name] = (time.monotonic() + _PROMPT_SECONDS, show)

    def _drain(self, rank: RankProcess, name: str) -> None:
        """Pass on what is still in the pipe, which may be held open by a stranger, and close it."""
        for _ in range(_LAST_CHUNKS):
            if not self._read(rank, name):
                break
        stream = self._streams.pop((rank.rank, name), None)
        if stream is not None:
            self._selector.unregister(rank.descriptor(name))
            rank.close(name)
            try:
                stream.finish()
            except ReaderGone:
                pass

    def _on_end(self, rank: RankProcess) -> None:
        end = rank.look()
        if end is None:
            return
        self._selector.unregister(rank.ended)
        self._departed(rank.rank, end)
        rank.signal_group(signal.SIGTERM)  # what it started has lost its purpose
        self._timers["leftovers", rank.rank] = (time.monotonic() + GRACE_SECONDS, lambda: self._abandon(rank))
        if rank.rank == self._reader and self._signals is not None:
            self._signals.passes_interrupts_on = False
        if self._ending:
            return
        if self._passed_interrupt_on and rank.rank == self._reader and end.code == 128 + signal.SIGINT:
            self._interrupted = signal.SIGINT
            self._end_all()
            return
        if self._verdict is not None:  # these were its last words
            if not self._running():
                self._end_all()
            return
        if end.code and self._first_failed is None:
            self._first_failed = rank
        self._judge(patient=True)

    def _on_signals(self) -> None:
        assert self._signals is not None
        for number in self._signals.take():
            if number == signal.SIGTSTP:
                self._suspend()
            elif number == signal.SIGINT and self._signals.passes_interrupts_on and not self._signals.pressed:
                self._pass_interrupt_on()
            elif not self._interrupted:
                self._interrupted = number
                self._output.say(f"horovodrun: {signal.Signals(number).name}: ending the job")
                self._end_all()

    def _suspend(self) -> None:
        """Stop all ranks and this process, and have the ranks go on when it does."""
        assert self._signals is not None
        for rank in self._ranks.values():
            rank.signal_group(signal.SIGSTOP)
        self._signals.suspend()
        for rank in self._ranks.values():
            rank.signal_group(signal.SIGCONT)

    def _pass_interrupt_on(self) -> None:
        assert self._reader is not None
        if not self._passed_interrupt_on:
            self._passed_interrupt_on = True
            self._output.say(
                f"horovodrun: Ctrl-C went to rank {self._reader}, which reads from this terminal; press it twice within a "
                "second to end the job"
            )
        self._ranks[self._reader].signal_group(signal.SIGINT)

    def _on_reader_gone(self) -> None:
        if not self._interrupted:
            self._interrupted = signal.SIGPIPE
            self._end_all()

    # What it does about it.

    def _judge(self, patient: bool) -> None:
        """Decide which rank failed first: one that suffers from another's failure may well end before it."""
        if self._first_failed is None or self._first_failed.exit is None:
            return
        accused = self._accusation()
        culprit = None if accused is None else self._ranks.get(accused.rank)
        if culprit is not None and culprit.exit is None and patient:
            deadline = time.monotonic() + _JUDGE_SECONDS
            self._timers.setdefault("judge", (deadline, lambda: self._judge(patient=False)))
            return
        self._timers.pop("judge", None)
        reason = accused.reason if accused is not None and culprit is not None else ""
        culprit = culprit or self._first_failed
        # A culprit that still runs, or says it did well, has no exit code to pass on; its first victim has.
        ended = culprit if culprit.exit is not None and culprit.exit.code else self._first_failed
        assert ended.exit is not None
        self._verdict = _Verdict(culprit, ended, ended.exit, reason)
        words = f"horovodrun: Process {ended.rank} exit with status code {ended.exit}."
        if ended is not culprit:
            words += f" Rank {culprit.rank} failed first."
        others = self._running()
        if others:
            words += f" Terminating the {others} rank{'s' * (others > 1)} that still run{'s' * (others == 1)}."
        self._output.say(words)
        if others:
            self._timers["last words"] = (time.monotonic() + _LAST_WORDS_SECONDS, self._end_all)
        else:
            self._end_all()

    def _end_all(self) -> None:
        self._timers.pop("last words", None)
        if self._ending:
            return
        self._ending = True
        for rank in self._ranks.values():
            rank.signal_group(signal.SIGTERM)
        strays = process_tree.members((), self._mark)
        process_tree.send([pid for pid in strays if not self._was_signalled(pid)], signal.SIGTERM)
        self._kill_at = time.monotonic() + GRACE_SECONDS
        self._timers["kill"] = (self._kill_at, self._kill_all)

    def _was_signalled(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) in self._sessions()
        except OSError:
            return True  # it has just ended

    def _kill_all(self) -> None:
        process_tree.send(process_tree.members(self._sessions(), self._mark), signal.SIGKILL)
        self._timers["give up"] = (time.monotonic() + _GIVE_UP_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._given_up = True

    def _abandon(self, rank: RankProcess) -> None:
        """A rank ended a while ago, but something it started lives on, or holds its output open."""
        rank.signal_group(signal.SIGKILL)
        for name in STREAMS:
            self._drain(rank, name)

    def _sweep(self) -> set[int]:
        """End what is left: nothing, if all went well. Strays outside their session are hunted in failed jobs only."""
        mark = self._mark if self._ending else b""
        grace = GRACE_SECONDS if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

        def find() -> set[int]:
            return process_tree.members(self._sessions(), mark)

        try:
            left = process_tree.end(find, grace)
        except BaseException:  # a second Ctrl-C: no courtesy any more
            process_tree.send(find(), signal.SIGKILL)
            raise
        finally:
            for rank in self._ranks.values():
                for name in STREAMS:
                    self._drain(rank, name)
                if rank.look() is not None and self._guardian is not None:
                    self._guardian.forget(rank.session)
                rank.reap()
            self._selector.close()
        return left

    def _sessions(self) -> list[int]:
        return [rank.session for rank in self._ranks.values()]

    def _outcome(self, immortal: set[int]) -> Outcome:
        exits = {number: rank.exit for number, rank in self._ranks.items() if rank.exit is not None}
        verdict = self._verdict
        if verdict is None:
            return Outcome(exits, interrupted=self._interrupted, immortal=frozenset(immortal))
        accused = self._accusation()  # the others may have told only after they had heard of its end
        known = accused.reason if accused is not None and accused.rank == verdict.culprit.rank else ""
        return Outcome(
            exits,
            culprit=verdict.culprit.rank,
            exit=verdict.end,
            victim=None if verdict.ended is verdict.culprit else verdict.ended.rank,
            place=verdict.culprit.plan.place,
            reason=verdict.reason or known,
            reader=self._reader,
            tail=tuple(self._tails[verdict.culprit.rank].tail),
            interrupted=self._interrupted,
            immortal=frozenset(immortal),
        )

    # Time.

    def _time_left(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(deadline for deadline, _ in self._timers.values()) - time.monotonic())

    def _run_timers(self) -> None:
        now = time.monotonic()
        for key, (deadline, act) in list(self._timers.items()):
            if deadline <= now and key in self._timers:
                del self._timers[key]
                act()
