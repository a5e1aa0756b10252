"""The steps of an optimizer of local training: when they send fragments of the outer parameters, and what is saved of them."""

from __future__ import annotations

from typing import Any

from horovod.torch.optimizer.compressor_state import MEMORY, load_memory, saved_memory
from horovod.torch.optimizer.local_parameters import LocalParameters
from horovod.torch.optimizer.local_settings import LocalSettings
from horovod.torch.uncompiled import uncompiled

OUTER = "horovod_outer"
"""The key of the outer state in ``state_dict()``."""


@uncompiled
class LocalSteps:
    """The steps of one optimizer.

    It counts the steps that the script attempts: a gradient scaler may skip one on some hosts only, and hosts must send their
    fragments after the same attempts.

    Attributes:
        parameters: local and outer ones.
    """

    def __init__(self, parameters: LocalParameters, settings: LocalSettings) -> None:
        self.parameters = parameters
        self._settings = settings
        self._attempts = 0
        self._scaler_attempts = False

    def begin(self) -> None:
        """Called before the wrapped optimizer's step."""
        self.parameters.adopt_changes()
        self.parameters.outer.begin(self.parameters.outer.sizes(trained=True))

    def end(self) -> None:
        """Called when the wrapped optimizer has made a step."""
        if not self._scaler_attempts:
            self._attempts += 1
        self._scaler_attempts = False
        self.catch_up()

    def begin_with_scaler(self) -> None:
        """Called before a gradient scaler steps. It may skip the step."""
        self.begin()
        self._attempts += 1
        self._scaler_attempts = True

    def discard(self) -> None:
        """Called when the script discards the gradients."""
        self.catch_up()
        self._scaler_attempts = False

    def catch_up(self) -> None:
        """Do what follows each attempted step."""
        while self.parameters.outer.steps < self._attempts:
            self.parameters.outer.after_step()

    def finish(self) -> None:
        """Give all ranks the average of the hosts' parameters."""
        self.catch_up()
        self.parameters.outer.finish()

    def load(self, state_dict: dict[str, Any]) -> None:
        """Replace the outer state and the memory of the compressor by those that ``state_dict`` has."""
        self.parameters.outer.load(state_dict.get(OUTER), self.parameters.outer.sizes(trained=False))
        self._attempts, self._scaler_attempts = self.parameters.outer.steps, False
        memory = state_dict.get(MEMORY)
        if memory is not None:
            load_memory(self.parameters.slots.values(), self._settings.of_memory, memory)

    def saved(self) -> dict[str, Any]:
        """What :meth:`load` needs, by the keys of ``state_dict()``."""
        self.catch_up()
        outer, memory = (
            self.parameters.outer.state(),
            saved_memory(self.parameters.slots.values(), self._settings.of_memory),
        )
        return {key: value for key, value in ((OUTER, outer), (MEMORY, memory)) if value is not None}
