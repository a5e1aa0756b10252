"""The messages of the rendezvous: an authenticated key-value store, and an all-gather.

``horovodrun`` runs one server (``server``) for the life of the job. Under other launchers rank 0 runs one during
``init()``. Ranks use ``client``. Values are opaque bytes.

A store of ``torch.distributed`` also changes values in one step (:mod:`~horovod.control.rendezvous.store_requests`).

``init()`` needs ``ExchangeValues``: every rank sends its value and gets the values of all ranks. Then the server forgets them,
so any number of init/shutdown cycles leaves nothing behind.
"""

from __future__ import annotations

import zlib

import msgspec

from horovod.control.rendezvous.store_requests import StoreRequest

VALUE_LIMIT = (1 << 32) - 1
REACHABILITY = "reachability"
"""The subject of the second all-gather of a call of ``init()``, of jobs on several hosts."""
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


class ExchangeValues(msgspec.Struct, tag=True):
    """Send the value of rank ``rank`` to the exchange ``key`` of ``size`` ranks. The answer has the values of all ranks.

    If only some of the launched ranks take part, ``members`` are their numbers in the launched job.
    """

    key: str
    rank: int
    size: int
    value: bytes
    seconds: float
    members: list[int] = []
    round: int = 0
    """The round of an elastic job; 0 for other jobs. The server refuses rounds that are over."""


class Values(msgspec.Struct, tag=True):
    """The answer: one value to a Get, one for each rank to an ExchangeValues, none to a Put."""

    values: list[bytes]


class CompressedValues(msgspec.Struct, tag=True):
    """Compressed :class:`Values`: the values of different ranks differ only in a few numbers.

    Attributes:
        size: the size of the encoded :class:`Values`, in bytes.
        deflated: the encoded :class:`Values`, compressed by zlib.
    """

    size: int
    deflated: bytes


class Refusal(msgspec.Struct, tag=True):
    """The answer if the values did not arrive in time, or the request was wrong."""

    reason: str
    timed_out: bool


Request = Put | Get | ExchangeValues | StoreRequest
Answer = Values | CompressedValues | Refusal

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
encode = msgspec.msgpack.Encoder().encode


_SHORT = 1 << 14
"""In bytes. Smaller answers are not compressed."""


def encode_values(values: list[bytes]) -> bytes:
    """An answer with the values, to be decoded by :func:`values_of`."""
    encoded = encode(Values(values))
    if len(encoded) < _SHORT:
        return encoded
    deflated = zlib.compress(encoded, 1)
    return encode(CompressedValues(len(encoded), deflated)) if len(deflated) < len(encoded) else encoded


def values_of(answer: Values | CompressedValues) -> list[bytes]:
    """The values of an answer.

    Raises:
        RendezvousError: the answer is damaged.
    """
    if isinstance(answer, CompressedValues):
        if not 0 < answer.size <= VALUE_LIMIT:  # zlib takes 0 for no limit
            raise RendezvousError(f"the rendezvous server has sent values of {answer.size} bytes")
        try:
            decoded = decode_answer(zlib.decompressobj().decompress(answer.deflated, answer.size))
        except (zlib.error, msgspec.DecodeError) as error:
            raise RendezvousError(f"the rendezvous server has sent values that cannot be read: {error}") from error
        if not isinstance(decoded, Values):
            raise RendezvousError("the rendezvous server has sent no values")
        answer = decoded
    return answer.values


class RendezvousError(RuntimeError):
    """The rendezvous failed; the message says which ranks were missing, or what was wrong."""


class ServerGoneError(RendezvousError):
    """The server cannot be reached, or has closed the connection without an answer."""
