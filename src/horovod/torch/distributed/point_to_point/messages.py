"""The protocol between two ranks for messages. The sender connects; each connection has one sender.

The sender sends a small message at once, and offers a large one. Once the receiver has memory for an offered message, it reads
the sender's memory if it can (both ranks on one host), or asks the sender for the data. In both cases it confirms the receipt.
"""

from __future__ import annotations

import msgspec

EAGER_BYTES = 64 << 10
"""The largest message that is sent without an offer to a rank on another host: an offer costs a round trip."""
EAGER_LOCAL_BYTES = 32 << 10
"""The largest one to a rank that can read this one's memory. Reading a larger message takes less time than the copies on its
way through a socket."""
PART_BYTES = 1 << 20
"""The size of the parts in which a large message is sent."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """The description of a message. The first three attributes match it with a receive.

    Attributes:
        group: the number of the group's process set.
        source: the sender's rank in the group.
        tag: the tag of the script's call.
        data_type: the name of the elements' type.
        nbytes: the size of the message.
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
    """A large message, whose elements stay at ``address`` in the sender's memory until :class:`Taken`.

    Attributes:
        number: the sender's number of the message.
        process: the sender's process id; 0 if the receiver is in another process namespace, so it cannot read the memory.
    """

    envelope: Envelope
    number: int
    process: int
    address: int


class MessagePart(msgspec.Struct, tag=2, array_like=True):
    """The next part of a large message that the receiver has asked for."""

    number: int
    data: bytes


class Ask(msgspec.Struct, tag=3, array_like=True):
    """The receiver's request to send an offered message, because it cannot read the sender's memory."""

    number: int


class Taken(msgspec.Struct, tag=4, array_like=True):
    """The receiver's confirmation that it has an offered message; or, with ``error``, the reason why it rejects the message."""

    number: int
    error: str = ""


Message = Whole | Offer | MessagePart | Ask | Taken

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
