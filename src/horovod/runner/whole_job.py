"""One program that starts all ranks itself, such as ``mpirun``: run as a single child of the launcher, to its end.

The child is started, read, signalled and swept up by the agent of this host, like any rank; what differs is what its end means.
Its output is shown as it comes, because it labels the ranks' lines itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod.runner.agent.messages import Exit
from horovod.runner.outcome import Failure, Outcome
from horovod.runner.output import Output, RankStream
from horovod.runner.policy import Decision, StaticPolicy

CHILD = 0
"""The number of the one process."""


class WholeJobPolicy(StaticPolicy):
    """Ends with its only process, which sees itself to it that all ranks end when one has failed.

    Args:
        reads_input: whether the process reads the launcher's standard input.
    """

    def __init__(self, *, reads_input: bool) -> None:
        super().__init__([CHILD], CHILD if reads_input else None)

    def _lead(self, reported: Failure | None, wait_for_it: bool) -> list[Decision]:
        # On other hosts it has ended its ranks itself; on this one whatever is left is ended.
        return [] if self._first_failed is None else self._end_all()


class PlainOutput(Output):
    """Shows the child's lines without a label of ours."""

    def stream(self, rank: int, name: str) -> RankStream:
        return RankStream("", [self._console[name]], timestamps=self._timestamps)


@dataclass(frozen=True)
class WholeJobOutcome(Outcome):
    """How the child ended. The culprit is the rank that failed first, if the runtime of any rank has said so."""

    program: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.exit.code) or bool(self.interrupted)

    def describe(self) -> str:
        words = Outcome(interrupted=self.interrupted, immortal=self.immortal, unheard=self.unheard).describe()
        lines = [words] if words else []
        if self.exit.code and not self.interrupted:
            lines.append(f"horovodrun: the job failed: {self.program} ended with exit code {self.exit}.")
            if self.culprit is not None:
                lines.append(f"Rank {self.culprit} failed first. Reason: {self.reason}")
        return "\n".join(lines)


def outcome(found: Outcome, program: str, reported: Failure | None) -> WholeJobOutcome:
    """What the supervisor of the child has found, as the end of a whole job.

    Args:
        accused: what the runtime of any rank has said about the first failure.
    """
    return WholeJobOutcome(
        exits=found.exits,
        exit=found.exits.get(CHILD, Exit(255)),
        culprit=None if reported is None else reported.rank,
        reason="" if reported is None else reported.reason,
        interrupted=found.interrupted,
        immortal=found.immortal,
        unheard=found.unheard,
        program=program,
    )
