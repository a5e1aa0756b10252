"""``hvd.OuterSGD``: the optimizer that steps with the averaged changes of the hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OuterSGD:
    """SGD with momentum, for ``outer=`` of local training. Its gradient is the average over the ranks of *outer parameter minus
    local parameter*. The defaults are those of DiLoCo (arXiv:2311.08105, section 3.1).

    ``OuterSGD(lr=1, momentum=0, nesterov=False)`` is plain averaging: local SGD (arXiv:1808.07217).

    Args:
        lr: the learning rate, above 0.
        momentum: at least 0 and below 1.
        nesterov: whether the momentum is Nesterov's, as in ``torch.optim.SGD``.

    Raises:
        ValueError: a number is out of its range, or ``nesterov`` without momentum.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (_is_number(self.lr) and 0 < self.lr < math.inf):
            raise ValueError(f"OuterSGD(lr={self.lr!r}): must be a number above 0")
        if not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"OuterSGD(momentum={self.momentum!r}): must be a number of at least 0 and below 1")
        if self.nesterov and not self.momentum:
            raise ValueError("OuterSGD(nesterov=True) needs a momentum above 0; pass nesterov=False")

    def step(self, parameter: Any, velocity: Any, gradient: Any) -> None:
        """Make one step on a parameter, in place.

        Args:
            parameter, velocity, gradient: arrays of NumPy or tensors of PyTorch, of one shape and type. ``parameter`` and
                ``velocity`` are overwritten, and ``gradient`` may be. The first velocity is zeros.
        """
        if self.momentum:
            velocity *= self.momentum
            velocity += gradient
            if self.nesterov:
                gradient += velocity * self.momentum
            else:
                gradient = velocity
        parameter -= gradient * self.lr


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
