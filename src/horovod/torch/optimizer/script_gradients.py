"""Which gradients the script has set itself, as far as their identities and counts tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from horovod.torch.optimizer.buckets import ParameterState

if TYPE_CHECKING:
    from horovod.torch.optimizer.gradient_passes import GradientPasses

_REPLACED = (
    "The gradient of {name!r} was replaced after a step, and no backward pass has reached it since. The new gradient may be "
    "reduced already, or it may be this rank's own. With this op or compression it must not be reduced twice. Call "
    "optimizer.zero_grad() before you set gradients."
)


def found_outside(
    passes: GradientPasses, slots: Iterable[tuple[ParameterState, torch.Tensor | None]], inside: bool
) -> tuple[int, int]:
    """The gradients that the script has set since their reduction, or that it has never had reduced.

    Args:
        slots: with the gradient of each that was last reduced.
        inside: whether a backward pass runs, which may have added to gradients before their hooks are called.

    Returns:
        The set of those that no round has reduced since the last step, and the set of those that have replaced such gradients.
    """
    outside = replaced = 0
    for slot, known in slots:
        gradient = slot.parameter.grad
        if gradient is None or slot.bit & passes.covered:
            continue
        if slot.bit & passes.local:
            if inside and (gradient is not slot.left() or gradient._version != slot.version):
                passes.check_added(slot, gradient)
                outside |= slot.bit
        elif slot.bit & passes.touched:
            continue
        elif slot.bit & passes.named or (passes.keeps_aside and slot.bit & passes.reduced):
            if passes.keeps_aside:
                replaced |= slot.bit if inside and slot.aside is not None else 0
            elif known is not gradient or (inside and gradient._version != slot.version):
                replaced |= slot.bit
        elif inside or known is not gradient:
            outside |= slot.bit
    return outside, replaced


def set_by_hand(passes: GradientPasses, slots: Iterable[ParameterState], touched: int) -> int:
    """The set of gradients that no backward pass has touched since the last step, and that may be this rank's own.

    A gradient that is reduced already, and was not discarded since, may be averaged again, because it is the same on all
    ranks. It must not be summed again. So if reduced parts are kept aside, as for a sum, this function leaves such a gradient
    out even if the script has changed it, and refuses a new tensor in its place, which may be reduced or not.
    """
    found = 0
    known = touched | passes.named | passes.covered
    for slot in slots:
        gradient = slot.parameter.grad
        if gradient is None or slot.bit & known:
            continue
        if passes.keeps_aside and slot.bit & passes.reduced:
            if slot.left() is not gradient:
                passes.fail(AssertionError(_REPLACED.format(name=slot.name)))
            continue
        found |= slot.bit
    return found


def were_changed(slots: Iterable[ParameterState], found: int) -> bool:
    """Whether the script has set all gradients of the set ``found``, and has then changed them in place, not to zero."""
    gradients = []
    for slot in slots:
        if not slot.bit & found:
            continue
        gradient = slot.parameter.grad
        if gradient is None or slot.reduced() is gradient or not gradient._version:
            return False
        gradients.append(gradient)
    return any(gradient.layout is not torch.strided or bool(gradient.any()) for gradient in gradients)
