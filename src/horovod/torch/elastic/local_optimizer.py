"""How a ``TorchState`` synchronises an optimizer of local training, whose hosts have different parameters.

A host keeps its parameters and the state of the wrapped optimizer if all its ranks have taken part before, and are at the
step of the rank that is furthest ahead. So only a host that was lost misses its round. Every other host, such as a new one,
takes the outer parameters.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod._bindings.objects import allgather_object
from horovod.core.lifecycle.context import current
from horovod.torch.elastic.handlers import OptimizerStateHandler
from horovod.torch.functions import broadcast_optimizer_state
from horovod.torch.optimizer.local_reduction import LocalGradientOptimizer

_NEW = -1


class LocalOptimizerStateHandler(OptimizerStateHandler):
    """An optimizer made by ``LocalOptimizer``, and the parameters that it trains."""

    def __init__(self, optimizer: LocalGradientOptimizer) -> None:
        self._met = False
        self._own: tuple[dict[str, Any], dict[torch.Tensor, torch.Tensor]] | None = None
        super().__init__(optimizer)

    def before_sync(self) -> None:
        """Decide whether this host keeps its parameters, and take them aside: the model's handler overwrites them."""
        parameters = self.value._horovod_local.parameters
        parameters.meet()
        hosts, own = current().hosts, current().identity.rank
        steps = allgather_object(parameters.outer.steps if self._met else _NEW, name="elastic.local_steps")
        ahead = steps[self.root_rank]
        keeps = ahead != _NEW and all(
            each == ahead for each, host in zip(steps, hosts, strict=True) if host == hosts[own]
        )
        self._own = (self.value.state_dict(), {p: p.detach().clone() for p in parameters.slots}) if keeps else None

    @torch.no_grad()
    def sync(self) -> None:
        self._saved.before_write()
        broadcast_optimizer_state(self.value, self.root_rank)
        own, self._own = self._own, None
        if own is None:
            self.value._horovod_local.parameters.outer.take_outer()
        else:
            self.value.load_wrapped(own[0])
            for parameter, value in own[1].items():
                parameter.copy_(value)
        self._met = True

    def mark(self) -> None:
        raise NotImplementedError(
            'hvd.LocalOptimizer needs rollback="commit": hosts are at different parameters, and fragments may be on their way'
        )
