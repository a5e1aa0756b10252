"""Where the ranks of a job meet: a small authenticated store, and an all-gather of address cards. What its two sides say.

The launcher runs one server (``rendezvous_server``) for the life of the job; under launchers that give no place to meet, rank
0 runs one for the moments of ``init()``. Ranks speak to it through ``rendezvous_client``. Values are opaque bytes.

``Exchange`` is what ``init()`` needs: every rank brings its value, all get all values, and the server forgets them, so
that any number of init/shutdown cycles leaves nothing behind.
"""

from __future__ import annotations

import msgspec

VALUE_LIMIT = (1 << 32) - 1
PURPOSE = b"rendezvous"


class Put(msgspec.Struct, tag=True):
    """Store a value."""

    key: str
    value: bytes
    only_first: bool = False


class Get(msgspec.Struct, tag=True):
    """Wait for a value, at most ``seconds``."""

    key: str
    seconds: float


class Exchange(msgspec.Struct, tag=True):
    """Bring rank ``rank``'s value to the exchange ``key`` of ``size`` ranks; the answer is everybody's.

    Where only some of the launched ranks take part, ``members`` are their numbers in the launched job.
    """

    key: str
    rank: int
    size: int
    value: bytes
    seconds: float
    members: list[int] = []
    round: int = 0
    """Of an elastic job; 0 for other jobs. The server refuses rounds that are over."""


class Values(msgspec.Struct, tag=True):
    """The answer: one value for a Get, one a rank for an Exchange, none for a Put."""

    values: list[bytes]


class Refusal(msgspec.Struct, tag=True):
    """The answer when there is none to give in time, or the question was wrong."""

    reason: str
    timed_out: bool


Request = Put | Get | Exchange
Answer = Values | Refusal

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
encode = msgspec.msgpack.Encoder().encode


class RendezvousError(RuntimeError):
    """The ranks could not meet; the message says who was missing or what was wrong."""


class ServerGoneError(RendezvousError):
    """The server cannot be reached, or has closed the connection without an answer."""
