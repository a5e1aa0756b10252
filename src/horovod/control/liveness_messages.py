"""The messages between liveness monitors (:mod:`horovod.control.liveness_monitor`)."""

from __future__ import annotations

import msgspec

from horovod.control.failure import LOST, Cause


class Ping(msgspec.Struct, tag=True):
    """Asks for a :class:`Pong`, and for what the receiver sees of the ranks ``about``, which do not answer."""

    about: list[int] = []


class Pong(msgspec.Struct, tag=True):
    """The sender's main thread is at ``where``, its other threads at ``threads``; they wait for the collectives
    ``awaited``. ``seen``: why each rank that was asked about cannot answer; "" if it runs. ``standing``: what the whole rank
    waits for, in the encoding of those that ask; empty if it may continue by itself."""

    where: str
    seen: dict[int, str] = {}
    threads: list[str] = []
    awaited: list[str] = []
    standing: bytes = b""


class FailureReport(msgspec.Struct, tag=True):
    """The sender has seen ``rank`` fail; ``suspected``: perhaps through the fault of another rank."""

    rank: int
    reason: str
    suspected: bool = False
    cause: Cause = LOST


class NoProgress(msgspec.Struct, tag=True):
    """A worker thread has seen no progress of ``rank``, for the n-th time (``times``) in one wait. The thread continues to
    wait."""

    rank: int
    reason: str
    times: int


class Failure(msgspec.Struct, tag=True):
    """Rank 0's decision: which rank failed first, and why."""

    rank: int
    reason: str
    cause: Cause = LOST


class DumpRequest(msgspec.Struct, tag=True):
    """Every rank must write its flight recorder: a member's request to rank 0, and rank 0's order to all."""

    why: str
    reason: str


class ProgressReport(msgspec.Struct, tag=True):
    """The recent progress of the sender, a member, for rank 0."""

    body: bytes


class Bye(msgspec.Struct, tag=True):
    """The sender has shut down normally, and closes its connections."""


class Forwarded(msgspec.Struct, tag=True):
    """An encoded message that passes through a relay. From above, ``ranks`` are its receivers: the relay itself, or ranks
    connected with the relay. From below, ``ranks`` is its one sender, a rank connected with the relay that forwards it."""

    ranks: list[int]
    body: bytes


Message = Ping | Pong | FailureReport | NoProgress | Failure | DumpRequest | ProgressReport | Bye | Forwarded

decode = msgspec.msgpack.Decoder(Message).decode
encode = msgspec.msgpack.Encoder().encode
