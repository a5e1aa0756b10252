"""The record that a rank sends to the others at the end of a backward pass, and the conclusions from all records. Pure.

A :class:`PassRecord` has one :class:`TouchedGradients` for each optimizer whose gradients the rank reduces now. Every rank gets
the records of all ranks, so all ranks conclude the same: which gradients of which optimizers are reduced (:func:`conclude`).
Sets of gradients are integers with one bit for each parameter, in the order of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from horovod.core.errors import MismatchError


class TouchedGradients(msgspec.Struct, frozen=True, array_like=True):
    """One optimizer in a rank's record.

    Attributes:
        name: the name of the optimizer.
        steps: the number of steps that the optimizer has made in this generation, since all ranks last joined.
        parameters: the number of its parameters.
        touched: the gradients with new contributions on this rank, as little-endian bytes.
        sparse: the gradients that are sparse on this rank, in the same form.
        final: the rank is in ``step()`` or ``synchronize()``, so its record has all gradients that are not reduced.
        held: a digest of values that must be the same on all ranks; 0: nothing is compared.
    """

    name: str
    steps: int
    parameters: int
    touched: bytes
    sparse: bytes = b""
    final: bool = False
    held: int = 0


class PassRecord(msgspec.Struct, frozen=True, array_like=True):
    """A rank's record, with its optimizers in the order of their names."""

    optimizers: tuple[TouchedGradients, ...] = ()

    def encode(self) -> bytes:
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PassRecord)


def decode(encoded: bytes) -> PassRecord:
    """The inverse of :meth:`PassRecord.encode`."""
    return _DECODER.decode(encoded)


def as_bytes(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def as_mask(encoded: bytes) -> int:
    return int.from_bytes(encoded, "little")


class Conclusion(msgspec.Struct, frozen=True):
    """What all ranks know about one optimizer after the exchange of records.

    Attributes:
        touched: the gradients with new contributions on any rank. They are reduced.
        sparse: the gradients that are sparse on any rank.
        final: whether the records of all ranks are final.
        alike: whether ``held`` is the same on all ranks that have sent it.
    """

    touched: int
    sparse: int
    final: bool
    alike: bool


def conclude(records: Mapping[int, PassRecord]) -> dict[str, Conclusion]:
    """The conclusions from the records of all ranks, by the name of the optimizer, in the same order on every rank.

    Args:
        records: the records by global rank.

    Raises:
        MismatchError: ranks are at different steps of an optimizer, or have different parameters. All ranks raise it.
    """
    found: dict[str, dict[int, TouchedGradients]] = {}
    for rank, record in sorted(records.items()):
        for each in record.optimizers:
            found.setdefault(each.name, {})[rank] = each
    return {name: _concluded(name, found[name], len(records)) for name in sorted(found)}


def _concluded(name: str, told: Mapping[int, TouchedGradients], ranks: int) -> Conclusion:
    for what, verb, unit in (("steps", "made ", "step"), ("parameters", "", "parameter")):
        counts: dict[int, list[int]] = {}
        for rank, each in told.items():
            counts.setdefault(getattr(each, what), []).append(rank)
        if len(counts) > 1:
            views = ", ".join(
                f"{_ranks(members)} {verb}{count} {unit}{'' if count == 1 else 's'}"
                for count, members in counts.items()
            )
            raise MismatchError(
                f"Ranks reduce gradients of {name}, but their optimizers differ: {views}. {_ADVICE[what]}",
                ranks=told,
                tensor=name,
            )
    touched = sparse = 0
    for each in told.values():
        touched |= as_mask(each.touched)
        sparse |= as_mask(each.sparse)
    final = len(told) == ranks and all(each.final for each in told.values())
    return Conclusion(touched, sparse, final, len({each.held for each in told.values()}) == 1)


_ADVICE = {
    "steps": (
        "Every rank must make the same passes and steps. Where one rank skips some, or makes more, for example because its "
        "loss is not finite, all must do so; allreduce the condition first."
    ),
    "parameters": "Every rank must give its optimizer the same parameters, and add or remove them at the same step.",
}


def _ranks(members: list[int]) -> str:
    """The subject of a sentence with its verb: ``rank 0 has`` or ``ranks 1, 2 have``."""
    one = len(members) == 1
    return f"{'rank' if one else 'ranks'} {', '.join(map(str, members))} {'has' if one else 'have'}"
