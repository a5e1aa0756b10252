"""An engine of some of a group's ranks, whose errors have the rank numbers of the whole group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from horovod.comm.base import Communicator, Completion, PeerFailure
from horovod.comm.forwarding import ForwardingCommunicator


class PartCommunicator(ForwardingCommunicator):
    """Forwards to a communicator of some of a group's ranks.

    Args:
        communicator: of these ranks; this object owns it from now on.
        ranks: their indices in the whole group, in the communicator's order.
    """

    name: ClassVar[str] = "part"

    def __init__(self, communicator: Communicator, ranks: Sequence[int]) -> None:
        super().__init__(communicator)
        self._ranks = ranks

    def forward(self, collective: Callable[..., Completion], *arguments: object) -> Completion:
        try:
            return collective(*arguments)
        except PeerFailure as failure:
            raise PeerFailure(self._ranks[failure.rank], failure.reason, failure.suspected) from failure
