"""Decides what one rank of an elastic job does next. Pure: the input is the result of the last call, the output is the next
call.

:mod:`horovod.elastic.loop` makes the calls. The launcher's side is :mod:`horovod.runner.elastic.elastic_policy`.

    SYNC -> TRAIN -> RETURN
      ^       |
      |       +-- failed: RESTORE, interrupted: SAVE
      |                      |
    RESET <- INIT <- NEXT <- SHUTDOWN       (INIT fails: SHUTDOWN again)

After RESET, a rank skips SYNC if the launcher says that all ranks of the round have the same state. The last round of this
rank does not decide that: another rank may be new, or may have failed where this one stopped.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple, TypeAlias


class Call(Enum):
    """The calls of a rank."""

    SYNC = auto()
    """Synchronise the state. A collective of all ranks."""
    TRAIN = auto()
    """Call the script's function."""
    RESTORE = auto()
    """Go back to the last save."""
    SAVE = auto()
    """Save the state as it is at the check that has interrupted the function."""
    SHUTDOWN = auto()
    """End the runtime."""
    NEXT = auto()
    """Ask for the rank in the next round."""
    INIT = auto()
    """Start the runtime. A collective of all ranks."""
    RESET = auto()
    """Adapt the state to the new round."""
    RETURN = auto()
    """Return what the script's function has returned."""
    RAISE = auto()
    """Raise the error of the last call."""


class ErrorKind(Enum):
    """The kinds of errors that end a call."""

    COLLECTIVE = auto()
    """A collective failed. Another round may succeed."""
    CONNECTION = auto()
    """The runtime could not start, because ranks did not find each other. Another round may succeed."""
    FINAL = auto()
    """The job ends, or the script is to blame: another round would not help."""


class Completed(NamedTuple):
    """A call is done."""


class Begun(NamedTuple):
    """INIT is done: the round begins."""

    same_state: bool
    """Whether all ranks of the round have the same state, by the launcher."""


class Failed(NamedTuple):
    """A call has raised an error."""

    kind: ErrorKind


class Interrupted(NamedTuple):
    """A check has found that hosts were added or removed, on all ranks."""

    skip_sync: bool
    """Whether hosts were only removed."""


Outcome: TypeAlias = Completed | Begun | Failed | Interrupted

_FOLLOWING = {
    Call.SYNC: Call.TRAIN,
    Call.TRAIN: Call.RETURN,
    Call.RESTORE: Call.SHUTDOWN,
    Call.SAVE: Call.SHUTDOWN,
    Call.SHUTDOWN: Call.NEXT,
    Call.NEXT: Call.INIT,
}
_IN_A_ROUND = (Call.INIT, Call.RESET, Call.SYNC, Call.TRAIN)


class RankPolicy:
    """One call of a function with ``hvd.elastic.run``.

    Attributes:
        call: what the rank does now.
        has_state: whether its state has been synchronised. If not, the state is that of the script's start.
        keeps_state: whether it comes with the state that all ranks of the last round had when they stopped.
    """

    def __init__(self) -> None:
        self.call = Call.SYNC
        self.has_state = False
        self.keeps_state = False
        self._same_state = False

    def after(self, outcome: Outcome) -> Call:
        """The next call."""
        self.call = self._following(outcome)
        return self.call

    def _following(self, outcome: Outcome) -> Call:
        if isinstance(outcome, Begun):
            self._same_state = outcome.same_state
            return Call.RESET
        if isinstance(outcome, Completed):
            if self.call is Call.RESET:
                return Call.TRAIN if self._same_state else Call.SYNC
            self.has_state = self.has_state or self.call is Call.SYNC
            return _FOLLOWING[self.call]
        if self.call not in _IN_A_ROUND:
            return Call.RAISE
        if isinstance(outcome, Interrupted):
            self.keeps_state = outcome.skip_sync and self.has_state
            return Call.SAVE
        self.keeps_state = False
        if outcome.kind is ErrorKind.FINAL:
            return Call.RAISE
        # Before RESET the state is as it was saved when the last round ended.
        return Call.SHUTDOWN if self.call is Call.INIT else Call.RESTORE
