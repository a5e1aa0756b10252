"""Changes of values in the rendezvous server in one step, for a store of ``torch.distributed``. Pure but for the mapping.

The semantics are those of PyTorch's ``TCPStore``: numbers are kept as decimal text, and a comparison with an empty expected
value succeeds if there is no value.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import msgspec


class Add(msgspec.Struct, tag=True):
    """Add to a number; a missing one is 0. The answer is the sum, as decimal text."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, tag=True):
    """Replace a value if it is the expected one. The answer is the value that there is then, or the expected one if there is
    none."""

    key: str
    expected: bytes
    desired: bytes


class Append(msgspec.Struct, tag=True):
    """Append to a value; a missing one is empty."""

    key: str
    value: bytes


class Delete(msgspec.Struct, tag=True):
    """Delete a value. The answer is its key, or nothing if there was none."""

    key: str


class Present(msgspec.Struct, tag=True):
    """Which of some keys have values. The answer has these keys."""

    keys: list[str]


class Count(msgspec.Struct, tag=True):
    """How many keys begin with a prefix. The answer is the number, as decimal text."""

    prefix: str


StoreRequest = Add | CompareSet | Append | Delete | Present | Count


def carry_out(request: StoreRequest, values: MutableMapping[str, bytes]) -> list[bytes]:
    """Carry out a request, and return the answer.

    Raises:
        ValueError: the value to add to is not a number.
    """
    if isinstance(request, Present):
        return [key.encode() for key in request.keys if key in values]
    if isinstance(request, Count):
        return [b"%d" % sum(key.startswith(request.prefix) for key in values)]
    if isinstance(request, Delete):
        return [request.key.encode()] if values.pop(request.key, None) is not None else []
    if isinstance(request, Add):
        values[request.key] = b"%d" % (int(values.get(request.key, b"0")) + request.amount)
    elif isinstance(request, Append):
        values[request.key] = values.get(request.key, b"") + request.value
    elif request.key in values:
        if values[request.key] == request.expected:
            values[request.key] = request.desired
    elif not request.expected:
        values[request.key] = request.desired
    else:
        return [request.expected]
    return [values[request.key]]
