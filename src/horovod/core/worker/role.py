"""The role of a rank in one process set: the set's first rank is its :class:`Coordinator`, every other rank a :class:`Member`.
On several hosts, the first rank of each host but the coordinator's is a :class:`Relay`, a member that communicates for its
host.

A worker has one role, and calls it in each step. A role sends and receives messages, and puts decisions into the worker's
:class:`Schedule`. It runs no collective and owns no thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from horovod.autotune.kept import Tuned
from horovod.control.failure import LOST, Cause
from horovod.core.negotiation.messages import Decision, Request, StepsMade, Stop
from horovod.core.requests.batch import Batch


class Watch(Protocol):
    """The liveness monitor as a worker and its role use it.

    Attributes:
        call_sites: by rank, the line of the script at its last answer.
        thread_lines: by rank, the lines of its other threads.
        awaited: by rank, the collectives that its threads waited for.
    """

    call_sites: dict[int, str]
    thread_lines: dict[int, list[str]]
    awaited: dict[int, list[str]]

    def report(self, rank: int, reason: str, suspected: bool = False, cause: Cause = LOST) -> None:
        """Report that ``rank`` has failed; ``suspected``: another rank may be the cause."""

    def report_no_progress(self, rank: int, reason: str, times: int) -> None:
        """Report for the n-th time in one wait that ``rank`` makes no progress in a collective."""

    def probe(self) -> None:
        """Ask all ranks whether they answer."""

    def request_dump(self, why: str, reason: str) -> None:
        """Make all ranks write their flight recorders."""

    def disagreed(self, reason: str) -> None:
        """Make this rank write its flight recorder: a collective fails on all ranks because their requests differ."""


class Schedule:
    """Decisions that have not been carried out on this rank yet.

    Attributes:
        batches: in the order in which every rank carries them out; between them, settings that hold for the batches after them.
        stop: the message of the rank that has left, once no batch follows any more; None before.
    """

    __slots__ = ("batches", "stop")

    def __init__(self) -> None:
        self.batches: deque[Sequence[Decision] | Tuned] = deque()
        self.stop: Stop | None = None


class Role(ABC):
    """A rank's part in the agreement of its process set. All methods are for the thread that drives the worker.

    Attributes:
        announces_between_batches: submissions are announced after each batch, not only after all that are due.
    """

    announces_between_batches: bool

    @abstractmethod
    def announce(self, requests: Sequence[Request], since: Sequence[float] = ()) -> None:
        """Announce this rank's requests to the coordinator.

        Args:
            since: by request, when it was submitted, by ``time.monotonic``, the earliest first; empty: now.
        """

    @abstractmethod
    def receive(self, member: int, body: bytes) -> None:
        """Take one message.

        Raises:
            MessageError, NegotiationError: the member broke the protocol.
        """

    @abstractmethod
    def leave(self, reason: str, steps: Sequence[StepsMade] = ()) -> None:
        """Tell the coordinator that this rank shuts down, and how many steps its optimizers have made."""

    @abstractmethod
    def decide(self) -> None:
        """Schedule the requests that have become ready; on a relay, forward the announcements of its host."""

    def record(self, batch: Batch) -> AbstractContextManager[None]:
        """A context in which the batch is carried out, for the timeline."""
        return NOT_RECORDED

    @abstractmethod
    def stop(self, stop: Stop) -> None:
        """Finish the process set after a rank has left and everything scheduled has run."""

    def milliseconds(self) -> float | None:
        """The time after which the worker must take a step even if nothing happens; None: never."""
        return None


NOT_RECORDED = nullcontext()
