"""Compares values that must be the same on all ranks but are in no collective: hyper-parameters, and the first parameters.

A binding calls :func:`compare` at a point that all ranks reach. If ranks differ, training continues, since some scripts intend
it, but rank 0 warns once. With ``HOROVOD_CHECK=error`` all ranks raise; with ``off`` nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from horovod._base.config import CHECK
from horovod.comparison.comparison import Comparison
from horovod.comparison.precision import Elements, differ
from horovod.core.errors import MismatchError
from horovod.core.lifecycle.context import running
from horovod.observe.call_site import warn

OFF, ERROR = "off", "error"
_SHOWN = 3
"""How many differences a message names."""
Value = str | Elements
"""What is compared under one label: text, which must be the same, or elements, which steps may have rounded differently."""


class Alike(Enum):
    """A kind of value that must be the same, with the texts of its message: what differs, and the usual cause."""

    HYPERPARAMETERS = (
        "Ranks are about to step with different hyper-parameters",
        "A scheduler that depends on a rank's own data, such as ReduceLROnPlateau with each rank's own loss, makes them "
        "differ: average its input over the ranks first, with hvd.allreduce.",
    )
    PARAMETERS = (
        "The parameters of the ranks differ before the first step",
        "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0), or its counterpart in your framework, after the "
        "model is made and before training starts.",
    )
    DRIFT = (
        "The parameters of the ranks have drifted apart after a step",
        "Every rank must make the same steps with the same gradients: change no parameter on some ranks only, and reduce "
        "gradients before they are used. If that is so, the rank that differs may compute wrongly: try its host alone.",
    )
    OUTER = (
        "The outer parameters of the hosts differ after an outer step",
        "Every rank must begin with the same parameters (hvd.broadcast_parameters), make the same number of steps, and load "
        "the same outer state, with optimizer.load_state_dict() on all ranks or on none.",
    )
    SAMPLERS = (
        "The samplers of the ranks draw with different seeds or epochs, so samples come twice or not at all",
        "Give DistributedSampler the same seed on all ranks, and call its set_epoch(epoch) on all of them.",
    )
    ORDER = (
        "The ranks shuffle their data in different orders before they take their shards, so samples come twice or not at all",
        "Call shard(hvd.size(), hvd.rank()) before shuffle(), or give shuffle() the same seed on all ranks.",
    )


def is_compared() -> bool:
    """Whether anything is compared in the running generation, which has more than one rank."""
    context = running()
    return context.config.check != OFF and context.identity.size > 1


def compare(what: Alike, held: Mapping[str, Value], name: str, process_set_id: int | None = 0, line: str = "") -> bool:
    """Compare what the ranks hold. Every member of the process set must call it at the same point.

    Args:
        held: by label, for example ``lr of group 0``, the value.
        name: the name of the comparison; each optimizer of a rank has its own.
        line: the line of the script that the values belong to.

    Returns:
        Whether nothing is reported: all ranks hold the same values, or values that differ only by rounding.

    Raises:
        MismatchError: they differ, and ``HOROVOD_CHECK=error``. All ranks raise it.
    """
    rows = Comparison(f"{name}.{what.name.lower()}", encode(held), process_set_id, line, awaited=True).wait()
    if rows is None:
        return True
    return not tell(what, {rank: decode(row) for rank, row in rows.items()}, made_at(line) if line else "", name)


def encode(held: Mapping[str, Value]) -> bytes:
    """Values by label as bytes: equal bytes for equal values, in whatever order a process holds them."""
    return msgspec.msgpack.encode(dict(sorted(held.items())))


def decode(row: bytes) -> dict[str, Value]:
    """The inverse of :func:`encode`."""
    return msgspec.msgpack.decode(row, type=dict[str, Value])


def tell(what: Alike, held: Mapping[int, Mapping[str, Value]], owner: str, name: str = "") -> bool:
    """Say which values of the ranks differ. Every rank that took part calls it, with what all of them hold, since bytes differ.

    Args:
        held, owner: as for :func:`describe_differences`.
        name: the comparison, for the error.

    Returns:
        Whether any differ; not if they were only rounded differently.

    Raises:
        MismatchError: ``HOROVOD_CHECK=error``.
    """
    text = describe_differences(what, held, owner)
    if text:
        complain(text, list(held), name)
    return bool(text)


def complain(text: str, ranks: Sequence[int], name: str = "", only_warn: bool = False) -> None:
    """Raise on all ranks with ``HOROVOD_CHECK=error``, otherwise warn on the first of them.

    Args:
        ranks: the ranks that took part.
        only_warn: warn in any case.
    """
    context = running()
    if context.config.check == ERROR and not only_warn:
        raise MismatchError(text, ranks=ranks, tensor=name)
    if context.identity.rank == min(ranks):
        hint = (
            f"{CHECK}={OFF} hides it" if only_warn else f"{CHECK}={ERROR} makes this an error, {CHECK}={OFF} hides it"
        )
        warn(f"{text} ({hint}.)")


def made_at(line: str) -> str:
    """A description of an optimizer."""
    return f"the optimizer made at {line}"


def describe_differences(what: Alike, held: Mapping[int, Mapping[str, Value]], owner: str = "") -> str:
    """The differences between ranks, as text; "" if there is none.

    Args:
        held: by rank, what it holds, by label.
        owner: what the values belong to, for example ``the optimizer made at FILE:LINE``.
    """
    labels = list(dict.fromkeys(label for each in held.values() for label in each))
    differing = [label for label in labels if differ([each.get(label) for each in held.values()])]
    if not differing:
        return ""
    shown = [f"{label}: {views(label, held)}" for label in differing[:_SHOWN]]
    if len(differing) > _SHOWN:
        shown.append(f"and {len(differing) - _SHOWN} more")
    found, cause = what.value
    of = f" (of {owner})" if owner else ""
    return f"{found}{of}: {'; '.join(shown)}. {cause}"


def views(label: str, held: Mapping[int, Mapping[str, Value]]) -> str:
    """What each rank holds under a label, such as ``0.1 on rank 0, 0.2 on ranks 1, 2``."""
    ranks: dict[str, list[int]] = {}
    for rank, each in sorted(held.items()):
        ranks.setdefault(str(each.get(label, "nothing")), []).append(rank)
    return ", ".join(
        f"{text} on {'rank' if len(members) == 1 else 'ranks'} {', '.join(map(str, members))}"
        for text, members in ranks.items()
    )
