"""The reductions by the names that scripts use, and checks of the arguments that say how to reduce."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from horovod._bindings.compression import form_of
from horovod._bindings.scalars import real
from horovod.comm.reduction import ReduceOp
from horovod.common.basics import rocm_built
from horovod.common.util import get_average_backwards_compatibility_fun
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission.arguments import loose_truth, set_id, shown, whole_number
from horovod.observe.call_site import warn

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_PUBLIC = {int(each): each for each in (Average, Sum, Adasum, Min, Max, Product)}


class _Names:
    Average = ReduceOp.AVERAGE
    Sum = ReduceOp.SUM


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_Names)


def reduction(op: Any, average: bool | None = None) -> ReduceOp:
    """The reduction that ``op=`` and the older ``average=`` ask for.

    ``average`` may be anything that is true or false. A text is most likely a name in the position of ``average``; it counts
    as true, with a warning.

    Raises:
        TypeError: ``average`` is neither true nor false.
        ValueError: both are given, or there is no such reduction.
    """
    if average is None and (op is None or type(op) is ReduceOp):
        return Average if op is None else op
    if isinstance(average, str) and op is None:
        text = f"the argument average={shown(average)} counts as True and is not a name; write name={shown(average)}"
        warn(text)
        return Average if average else Sum
    chosen = handle_average_backwards_compatibility(op, None if average is None else loose_truth(average, "average"))
    try:
        return _PUBLIC[whole_number(chosen, "op")]
    except (TypeError, ValueError, KeyError):
        names = ", ".join(f"hvd.{each.label}" for each in _PUBLIC.values())
        raise ValueError(f"op={shown(op)} is not a reduction; use one of {names}") from None


_Arguments = TypeVar("_Arguments", bound="ReductionArguments")


class ReductionArguments(msgspec.Struct, frozen=True):
    """How a collective reduces: the checked arguments of allreduce and reducescatter.

    Attributes:
        op: the reduction.
        prescale, postscale: the factors before and after the reduction.
        process_set: the ranks that reduce.
        chosen_form: the format of compression between hosts; "" for none, None for that of HOROVOD_COMPRESSION.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set
    chosen_form: str | None = ""

    @property
    def form(self) -> str:
        """The format of compression between hosts that is asked for; "" for none.

        Raises:
            HorovodInternalError: not initialised.
        """
        return running().config.compression if self.chosen_form is None else self.chosen_form

    def compressed_by(self: _Arguments, compression: Any) -> _Arguments:
        """The same reduction with a choice of ``compression=``. Raises ValueError as :func:`form_of`."""
        return msgspec.structs.replace(self, chosen_form=form_of(compression, self.op))

    @property
    def scaled(self) -> bool:
        """Whether elements are multiplied or divided."""
        return self.op is ReduceOp.AVERAGE or self.prescale != 1.0 or self.postscale != 1.0

    @property
    def factor(self) -> float:
        """By what a sum is multiplied, in all."""
        members = len(self.process_set.ranks or ()) if self.op is ReduceOp.AVERAGE else 1
        return self.prescale * self.postscale / max(members, 1)

    @property
    def positional(self) -> tuple[ReduceOp, float, float, int | None]:
        """The arguments as ``allreduce`` and ``reducescatter`` of :mod:`horovod.core.submission.collectives` take them."""
        return self.op, self.prescale, self.postscale, self.process_set.process_set_id


_NOTHING = object()
_IMMUTABLE = (type(None), int, float, ReduceOp, ProcessSet)
_last: tuple[Any, Any, Any, Any, ReductionArguments] = (_NOTHING, _NOTHING, _NOTHING, _NOTHING, ReductionArguments())
"""The arguments that were checked last, and the result. Most scripts pass the same objects in every call."""


def checked_reduction(
    op: Any, average: bool | None, prescale_factor: Any, postscale_factor: Any, process_set: ProcessSet
) -> ReductionArguments:
    """Check the arguments that the user passed.

    Raises:
        TypeError, ValueError: an argument is wrong. The text says which.
    """
    global _last
    last_op, last_prescale, last_postscale, last_set, known = _last
    if (
        average is None
        and op is last_op
        and prescale_factor is last_prescale
        and postscale_factor is last_postscale
        and process_set is last_set
    ):
        return known
    if type(process_set) is not ProcessSet:
        set_id(process_set)
    prescale, postscale = real(prescale_factor, "prescale_factor"), real(postscale_factor, "postscale_factor")
    checked = ReductionArguments(reduction(op, average), prescale, postscale, process_set, None)
    given = op, prescale_factor, postscale_factor, process_set
    if average is None and all(type(each) in _IMMUTABLE for each in given):
        _last = *given, checked
    return checked


def check_predivide(factor: float, op: ReduceOp) -> None:
    """``gradient_predivide_factor=`` of an optimizer.

    Raises:
        ValueError: it is not positive, or the reduction is not an Average.
    """
    if factor != 1.0 and rocm_built():
        raise ValueError("gradient_predivide_factor not supported yet with ROCm")
    if factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not factor > 0:
        raise ValueError(f"gradient_predivide_factor must be > 0, not {factor!r}")


def check_members(op: ReduceOp, process_set: ProcessSet) -> None:
    """Check that an optimizer can use ``op`` over ``process_set``.

    Raises:
        NotImplementedError: Adasum, over some of the ranks.
        ValueError: the set is not registered.
    """
    check_adasum(op, process_set)
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered; pass it to hvd.init() or hvd.add_process_set()")


def check_adasum(op: ReduceOp, process_set: ProcessSet) -> None:
    """Raises NotImplementedError for Adasum over some of the ranks."""
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("op=hvd.Adasum reduces over all ranks; leave out process_set, or use hvd.Average")
