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
        rounds: how often its gradients were reduced since the last of these steps.
        held: a digest of values that must be the same on all ranks; 0: nothing is compared.
    """

    name: str
    steps: int
    parameters: int
    touched: bytes
    sparse: bytes = b""
    final: bool = False
    rounds: int = 0
    held: int = 0

    def alone(self) -> Conclusion:
        """The conclusion if all ranks have this entry."""
        return Conclusion(as_mask(self.touched), as_mask(self.sparse), self.final, True)


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


def is_idle(records: Mapping[int, PassRecord]) -> bool:
    """Whether all ranks are in ``step()`` of different optimizers, and none has a gradient to reduce."""
    entries = [each for record in records.values() for each in record.optimizers]
    named = {tuple(each.name for each in record.optimizers) for record in records.values()}
    return len(named) > 1 and all(each.final and not as_mask(each.touched) for each in entries)


def _concluded(name: str, by_rank: Mapping[int, TouchedGradients], ranks: int) -> Conclusion:
    if len({each.steps for each in by_rank.values()}) > 1:
        views = _views({rank: _place(each) for rank, each in by_rank.items()}, "is", "are")
        raise MismatchError(
            f"Ranks reduce gradients of {name} at different steps: {views}. {_STEPS}", ranks=by_rank, tensor=name
        )
    if len({each.parameters for each in by_rank.values()}) > 1:
        counts = {rank: f"{each.parameters} parameter{'s' * (each.parameters != 1)}" for rank, each in by_rank.items()}
        views = _views(counts, "has", "have")
        raise MismatchError(f"Ranks reduce gradients of {name}, but {views}. {_PARAMETERS}", ranks=by_rank, tensor=name)
    touched = sparse = 0
    for each in by_rank.values():
        touched |= as_mask(each.touched)
        sparse |= as_mask(each.sparse)
    final = len(by_rank) == ranks and all(each.final for each in by_rank.values())
    return Conclusion(touched, sparse, final, len({each.held for each in by_rank.values()}) == 1)


_STEPS = (
    "All ranks must make the same backward passes for each step: as many microbatches, and as many calls of a closure, whose "
    "optimizer must take the same decisions on all ranks. A pass that only one rank makes, for example for diagnostics, "
    "belongs inside "
    "optimizer.no_sync(), with zero_grad() after it. If one rank skips a step, for example because its loss is not finite, "
    "all must skip it; allreduce the condition first."
)
_PARAMETERS = "Every rank must give its optimizer the same parameters, and add or remove them at the same step."


def _place(touched: TouchedGradients) -> str:
    """Where a rank is."""
    inside = "" if touched.final else f"pass {touched.rounds + 1} of "
    return f"in {inside}step {touched.steps + 1}"


def _views(texts: Mapping[int, str], singular: str, plural: str) -> str:
    """What each rank has or is: ``rank 0 is in step 2, ranks 1, 2 are in step 3``."""
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)
    return ", ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} "
        f"{singular if len(ranks) == 1 else plural} {text}"
        for text, ranks in found.items()
    )
