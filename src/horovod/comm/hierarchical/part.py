"""An engine of some of a group's ranks, whose errors number the ranks as the whole group does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from horovod.comm.base import Communicator, Completion, PeerFailure
from horovod.comm.forwarding import ForwardingCommunicator


class Part(ForwardingCommunicator):
    """A communicator of ``ranks`` (indices in the group, in the communicator's order). Owns it."""

    name: ClassVar[str] = "part"

    def __init__(self, communicator: Communicator, ranks: Sequence[int]) -> None:
        super().__init__(communicator)
        self._ranks = ranks

    def forward(self, collective: Callable[..., Completion], *arguments: object) -> Completion:
        try:
            return collective(*arguments)
        except PeerFailure as failure:
            raise PeerFailure(self._ranks[failure.rank], failure.reason, failure.suspected) from failure
