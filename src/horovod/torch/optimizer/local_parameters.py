"""The parameters of an optimizer of local training: those that its host trains, and the outer ones beside them."""

from __future__ import annotations

import torch

from horovod.core.lifecycle.context import running
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.local_rounds import TensorRounds
from horovod.torch.optimizer.local_settings import LocalSettings, meet
from horovod.torch.optimizer.parameters import OptimizerParameters


class LocalParameters(OptimizerParameters):
    """The parameters of one optimizer.

    Attributes:
        outer: the outer parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: LocalSettings, identity: OptimizerIdentity) -> None:
        super().__init__(optimizer, settings, identity)
        self._arguments = settings
        self._met_in = running().generation if settings.process_set.process_set_id is not None else -1
        self.outer = TensorRounds(settings, self.slots, identity.name)

    def meet(self) -> None:
        """Begin a generation. Every rank must call it; see :func:`horovod.torch.optimizer.local_settings.meet`."""
        if meet(self._arguments):
            self._met_in = running().generation
            self.look_again()  # hooks may wait for the process set
            self.outer.new_generation()
            super().prepare()

    def prepare(self) -> None:
        if running().generation != self._met_in:
            self.meet()
        super().prepare()
