"""A job whose ranks another program starts, such as ``mpirun``: that program is the launcher's only child.

The launcher runs the rendezvous server and the program. The agent of this host starts the program, reads its output, signals
it and ends what is left of it, as it does with a rank. The program starts all ranks and ends all of them when one has failed.
The launcher learns how the ranks ended from the program's exit code and from the ranks' runtime.
"""

from __future__ import annotations

import shlex
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from horovod._base import config
from horovod.runner import worker_environment
from horovod.runner.agent.base import HostFacts
from horovod.runner.agent.local_agent import LocalAgent
from horovod.runner.agent.messages import Exit, ProcessPlan
from horovod.runner.children import Cleanup
from horovod.runner.dry_run import hide
from horovod.runner.event_loop import Loop
from horovod.runner.job import LOOPBACK, Job
from horovod.runner.output.outcome import Outcome, ReportedFailure
from horovod.runner.output.output import JobOutput, RankStream, Sink
from horovod.runner.policy import Decision, LookAtAll, StaticPolicy
from horovod.runner.reach.reach import launcher_addresses
from horovod.runner.signals import SignalPipe
from horovod.runner.supervisor import Plans, Supervisor

CHILD = 0
"""The number of the program's process."""
_OF_A_RANK = (*config.OF_TORCHRUN, config.HOSTNAME)
"""A launcher that is itself a rank of another job has these variables. The ranks of this job must not inherit them."""


class ExternalJob(Job):
    """See :class:`Job`. A subclass says which program starts the ranks, with which arguments, files and variables."""

    program: str
    """The program's name, for messages."""

    @abstractmethod
    def _command_line(self, cleanup: ExitStack) -> Sequence[str]:
        """The program and its arguments. Makes the files that the arguments name; ``cleanup`` removes these files."""

    @abstractmethod
    def _cores(self) -> int | None:
        """The number of cores of a host, which its ranks share; None if it is not known."""

    def _variables(self, rendezvous: Mapping[str, str]) -> dict[str, str]:
        """The environment of the program, which passes it on to the ranks.

        Args:
            rendezvous: where the rendezvous server listens, and the job's secret.
        """
        inherited = {name: value for name, value in self._launcher_environment.items() if name not in _OF_A_RANK}
        return {
            **inherited,
            **self._asked,
            **self._threads(),
            **self._memory,
            **self._recorder_variables(),
            **rendezvous,
        }

    def _unreachable(self) -> Mapping[str, str]:
        """Hosts that cannot be reached, and why. Called when the program has failed, and no rank has reported a failure."""
        return {}

    def _title(self) -> str:
        """The program as ``--verbose`` names it."""
        return self.program

    def run(
        self,
        stdout: Sink,
        stderr: Sink,
        signals: SignalPipe | None = None,
        published: Mapping[str, bytes] | None = None,
    ) -> Outcome:
        options = self._options
        output = PlainOutput(stdout, stderr, len(self.slots), timestamps=options.prefix_output_with_timestamp)
        with Cleanup() as cleanup, cleanup:
            command = tuple(self._command_line(cleanup))
            server, secret = self._serve(cleanup, published or {})
            mark = f"{config.SECRET_KEY}={secret}".encode()
            guardian = self._start_guardian(cleanup, mark, output)
            self._say_what_has_no_effect(output)
            reads_input = self._reader is not None
            loop = Loop()
            cleanup.callback(loop.close)
            supervisor = Supervisor(
                loop,
                output,
                ExternalJobPolicy(reads_input=reads_input),
                locations={},
                reported_failure=self._reported_failure,
                departed=lambda *_: None,
                signals=signals,
                reader=CHILD if reads_input else None,
            )
            cleanup.callback(supervisor.kill)
            facts = HostFacts(sys.executable, 1, (), None)  # not used: the program decides what runs where
            agent = LocalAgent(
                [self.program], loop, supervisor.report, facts, mark=mark, guardian=guardian, inherits_input=True
            )
            point = worker_environment.rendezvous_point((self._addresses(), server.address[1]), secret)
            variables = self._variables(point)
            if options.verbose:
                output.say(f"horovodrun: {self._describe(command, variables)}")
            plans: list[Plans] = [(variables, [ProcessPlan(CHILD, command, {}, reads_input)])]
            ended = outcome(
                supervisor.run([agent], lambda: plans, self._seconds), self.program, self._reported_failure()
            )
            unexplained = ended.failed and not ended.interrupted and ended.culprit is None
            return replace(ended, unreachable=self._unreachable()) if unexplained else ended

    def dry_run(self) -> str:
        """The commands that :meth:`run` would start, as text. Starts nothing.

        Raises:
            LaunchError: this host has none of the network interfaces that the job may use.
        """
        with ExitStack() as cleanup:
            command = self._command_line(cleanup)
            variables = self._variables(hide(worker_environment.rendezvous_point((self._addresses(), 0), "")))
            first = "horovodrun: this is the job that would run; nothing is started."
            return "\n".join([first, *self._notices(), self._describe(command, variables)])

    def _describe(self, command: Sequence[str], variables: Mapping[str, str]) -> str:
        """The job as text. The job's secret is not shown."""
        point = f"{variables[config.RENDEZVOUS_ADDRESS]}:{variables[config.RENDEZVOUS_PORT]}"
        changed = {**self._asked, **self._threads(), **self._memory}
        return "\n".join(
            [
                f"{len(self.slots)} ranks by {self._title()}: {shlex.join(command)}",
                f"  rendezvous server at {point}",
                *(f"  {name}={value}" for name, value in sorted(changed.items())),
            ]
        )

    def _addresses(self) -> str:
        """The addresses of this host, separated by commas; a rank tries each to reach the rendezvous server."""
        return ",".join(launcher_addresses(self._options)) if self._elsewhere else LOOPBACK

    def _threads(self) -> dict[str, str]:
        """The variables with the number of threads of each rank: the same on all hosts, to fit the host with the most ranks."""
        cores = self._cores()
        if cores is None:
            return {}
        most = max(Counter(slot.hostname for slot in self.slots).values())
        return worker_environment.threads(self._launcher_environment, cores, most)


class ExternalJobPolicy(StaticPolicy):
    """Ends the job when the program ends.

    Args:
        reads_input: whether the program reads the launcher's standard input.
    """

    def __init__(self, *, reads_input: bool) -> None:
        super().__init__([CHILD], CHILD if reads_input else None)

    def ended(self, rank: int, end: Exit, reported: ReportedFailure | None) -> list[Decision]:
        decisions = super().ended(rank, end, reported)
        # The program has ended its ranks on other hosts. On this host, processes that are left are ended here.
        return self._end_all() if decisions == [LookAtAll()] else decisions


class PlainOutput(JobOutput):
    """Shows the program's lines as they are: a line may be from any rank, and the program may have labelled it."""

    def stream(self, rank: int, name: str) -> RankStream:
        return RankStream("", [self._console[name]], timestamps=self._timestamps)


@dataclass(frozen=True)
class ExternalJobOutcome(Outcome):
    """How the program ended. ``culprit`` is known only if the runtime of a rank has reported a failure."""

    program: str = ""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Hosts that cannot be reached, and why."""

    @property
    def failed(self) -> bool:
        return bool(self.exit.code) or bool(self.interrupted)

    def describe(self, *, below_output: bool = False) -> str:
        message = Outcome(interrupted=self.interrupted, immortal=self.immortal, unheard=self.unheard).describe()
        lines = [message] if message else []
        if self.exit.code and not self.interrupted:
            lines.append(f"horovodrun: the job failed: {self.program} ended with exit code {self.exit}.")
            if self.culprit is not None:
                lines.append(f"Rank {self.culprit} failed first. Reason: {self.reason}")
            lines += [f"Host {host} cannot be reached by ssh: {reason}" for host, reason in self.unreachable.items()]
        return "\n".join(lines)


def outcome(found: Outcome, program: str, reported: ReportedFailure | None) -> ExternalJobOutcome:
    """The outcome of a whole job.

    Args:
        found: what the supervisor says about the program's process.
        reported: the first failure that the runtime of any rank has reported.
    """
    return ExternalJobOutcome(
        exits=found.exits,
        exit=found.exits.get(CHILD, Exit(255)),
        culprit=None if reported is None else reported.rank,
        reason="" if reported is None else reported.reason,
        interrupted=found.interrupted,
        immortal=found.immortal,
        unheard=found.unheard,
        program=program,
    )
