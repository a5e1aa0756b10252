"""The protocol between two ranks for messages. The sender connects; each connection has one sender.

A small message is sent at once. A large one is offered: when the receiver has memory for it, it reads the sender's memory if it
can (both on one host), or asks the sender to send. In both cases it confirms the end to the sender.
"""

from __future__ import annotations

import msgspec

EAGER_BYTES = 64 << 10
"""The largest message that travels at once."""
PART_BYTES = 1 << 20
"""Of a large message that is sent."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """The properties that distinguish messages.

    Attributes:
        group: the number of the group's process set.
        source: the sender's rank in the group.
        tag: of the script's call.
        data_type: of the elements, by name.
        nbytes: of all elements.
        caller: the line of the script that sends.
    """

    group: int
    source: int
    tag: int
    data_type: str
    nbytes: int
    caller: str = ""


class Whole(msgspec.Struct, tag=0, array_like=True):
    """A small message."""

    envelope: Envelope
    data: bytes


class Offer(msgspec.Struct, tag=1, array_like=True):
    """A large message, whose elements lie at ``address`` of process ``process`` until it is taken."""

    envelope: Envelope
    number: int
    process: int
    address: int


class MessagePart(msgspec.Struct, tag=2, array_like=True):
    """The next part of a large message that was asked for."""

    number: int
    data: bytes


class Ask(msgspec.Struct, tag=3, array_like=True):
    """The receiver cannot read the sender's memory: send the message."""

    number: int


class Taken(msgspec.Struct, tag=4, array_like=True):
    """The receiver has the message; or will never take it, for the reason ``error``."""

    number: int
    error: str = ""


Message = Whole | Offer | MessagePart | Ask | Taken

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
