"""Whether only backward has changed a gradient, as far as PyTorch's count of changes tells (``_version``).

PyTorch counts the changes of gradients that are views of one tensor together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horovod.torch.optimizer.buckets import ParameterState


def is_as_left(
    slot: ParameterState, gradient: torch.Tensor, slots: Iterable[ParameterState], additions: int = 0
) -> bool:
    """Whether a local gradient is as the last pass has left it.

    Args:
        slots, additions: as of :func:`is_only_added`.
    """
    return gradient is slot.left() and (
        gradient._version == slot.version + additions or is_only_added(slot, gradient, slots, additions)
    )


def is_only_added(
    slot: ParameterState, gradient: torch.Tensor, slots: Iterable[ParameterState], additions: int
) -> bool:
    """Whether a gradient is a view of a larger tensor that backward alone has changed, as far as its count of changes tells.

    The count exceeds that of the slot, because backward has added to other gradients in the same tensor since.

    Args:
        slots: the slots of the optimizer. Their ``version`` is the count after the last known change of their gradients.
        additions: how many additions of backward are not in these counts yet.
    """
    if gradient.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    if storage.nbytes() <= gradient.numel() * gradient.element_size():
        return False
    address = storage.data_ptr()
    together = [
        each.version
        for each in slots
        if (other := each.parameter.grad) is not None and other.untyped_storage().data_ptr() == address
    ]
    return max(together) + additions == gradient._version <= slot.version + 2 * len(together)
