"""Matches messages and receives. A message goes to the oldest receive that accepts it, and a receive takes the oldest message
that it accepts. Pure.

Messages of one rank with the same tag are received in the order in which they were sent. A receive from any rank takes the
message that has arrived first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from horovod.torch.distributed.point_to_point.messages import Envelope

ANY = -1
"""The source of a receive from any rank."""

Arrived = TypeVar("Arrived")
Posted = TypeVar("Posted")


@dataclass(frozen=True)
class ReceiveFilter:
    """The messages that a receive accepts: those of a group with a tag, from one rank of the group or from :data:`ANY`."""

    group: int
    source: int
    tag: int

    def takes(self, envelope: Envelope) -> bool:
        return self.source in (ANY, envelope.source)


@dataclass
class _Queue(Generic[Arrived, Posted]):
    arrived: list[tuple[Envelope, Arrived]] = field(default_factory=list)
    posted: list[tuple[ReceiveFilter, Posted]] = field(default_factory=list)


class Matching(Generic[Arrived, Posted]):
    """Messages without a receive yet, and receives without a message yet.

    Attributes:
        held: the number of messages without a receive.
    """

    def __init__(self) -> None:
        self.held = 0
        self._queues: dict[tuple[int, int], _Queue[Arrived, Posted]] = {}

    def arrive(self, envelope: Envelope, message: Arrived) -> Posted | None:
        """Remove and return the receive for a message. None: there is none yet, and the message waits."""
        queue = self._queue(envelope.group, envelope.tag)
        for index, (wanted, posted) in enumerate(queue.posted):
            if wanted.takes(envelope):
                del queue.posted[index]
                self._drop_empty(envelope.group, envelope.tag)
                return posted
        queue.arrived.append((envelope, message))
        self.held += 1
        return None

    def post(self, wanted: ReceiveFilter, receive: Posted) -> tuple[Envelope, Arrived] | None:
        """Remove and return the message for a receive. None: there is none yet, and the receive waits."""
        queue = self._queue(wanted.group, wanted.tag)
        for index, (envelope, message) in enumerate(queue.arrived):
            if wanted.takes(envelope):
                del queue.arrived[index]
                self.held -= 1
                self._drop_empty(wanted.group, wanted.tag)
                return envelope, message
        queue.posted.append((wanted, receive))
        return None

    def take_posted(self) -> list[Posted]:
        """Remove and return all receives that wait."""
        found = [posted for queue in self._queues.values() for _, posted in queue.posted]
        for queue in self._queues.values():
            queue.posted.clear()
        return found

    def posted(self) -> list[Posted]:
        """All receives that wait."""
        return [posted for queue in self._queues.values() for _, posted in queue.posted]

    def arrived(self) -> list[Arrived]:
        """All messages that wait for a receive."""
        return [message for queue in self._queues.values() for _, message in queue.arrived]

    def waiting(self) -> bool:
        """Whether a receive waits."""
        return any(queue.posted for queue in self._queues.values())

    def _queue(self, group: int, tag: int) -> _Queue[Arrived, Posted]:
        return self._queues.setdefault((group, tag), _Queue())

    def _drop_empty(self, group: int, tag: int) -> None:
        queue = self._queues[group, tag]
        if not queue.arrived and not queue.posted:
            del self._queues[group, tag]
