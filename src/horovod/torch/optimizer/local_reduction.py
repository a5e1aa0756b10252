"""The distributed part and the methods of an optimizer whose ranks reduce gradients inside their host, and parameters across
hosts."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from horovod.core.lifecycle.context import running
from horovod.torch.optimizer.compressor_state import MEMORY, load_memory, saved_memory
from horovod.torch.optimizer.gradient_optimizer import GradientOptimizer
from horovod.torch.optimizer.gradient_reduction import GradientReduction
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.local_rounds import TensorRounds
from horovod.torch.optimizer.local_settings import LocalSettings, meet
from horovod.torch.optimizer.settings import OptimizerSettings

OUTER = "horovod_outer"
"""The key of the outer state in ``state_dict()``."""


class LocalReduction(GradientReduction):
    """The distributed part of an optimizer of local training.

    It counts the steps that the script attempts: a gradient scaler may skip one on some hosts only, and hosts must send their
    fragments after the same attempts.

    Attributes:
        rounds: the outer parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, identity: OptimizerIdentity
    ) -> None:
        assert isinstance(settings, LocalSettings), "LocalOptimizer makes it"
        super().__init__(optimizer, settings, identity)
        self._arguments = settings
        self._attempts = 0
        self._met_in = running().generation if settings.process_set.process_set_id is not None else -1
        self._scaler_attempts = False
        self.rounds = TensorRounds(settings, self.parameters.slots, identity.name)

    def begin_step(self) -> None:
        """Called before the wrapped optimizer's step."""
        self.parameters.adopt_changes()
        self.rounds.begin(self.rounds.sizes(trained=True))

    def end_step(self) -> None:
        super().end_step()
        if not self._scaler_attempts:
            self._attempts += 1
        self._scaler_attempts = False
        self.catch_up()

    def before_scaler_steps(self) -> None:
        self.catch_up()
        super().before_scaler_steps()
        self.begin_step()
        self._attempts += 1
        self._scaler_attempts = True

    def zero_grad(self) -> None:
        self.catch_up()
        self._scaler_attempts = False
        super().zero_grad()

    def catch_up(self) -> None:
        """Do what follows each attempted step."""
        while self.rounds.steps < self._attempts:
            self.rounds.after_step()

    def load(self, outer: dict[str, Any] | None, memory: dict[str, Any] | None) -> None:
        """Replace the outer state and the memory of the compressor by saved ones."""
        self.rounds.load(outer, self.rounds.sizes(trained=False))
        self._attempts, self._scaler_attempts = self.rounds.steps, False
        if memory is not None:
            load_memory(self.parameters.slots.values(), self._arguments.of_memory, memory)

    def saved(self) -> dict[str, Any]:
        """What :meth:`load` needs, by the keys of ``state_dict()``."""
        self.catch_up()
        outer, memory = self.rounds.state(), saved_memory(self.parameters.slots.values(), self._arguments.of_memory)
        return {key: value for key, value in ((OUTER, outer), (MEMORY, memory)) if value is not None}

    def meet(self) -> None:
        """Begin a generation. Every rank must call it; see :func:`horovod.torch.optimizer.local_settings.meet`."""
        if meet(self._arguments):
            self._met_in = running().generation
            self.parameters.look_again()  # hooks may wait for the process set
            self.rounds.new_generation()
            super().prepare()

    def prepare(self) -> None:
        if running().generation != self._met_in:
            self.meet()
        super().prepare()


class LocalGradientOptimizer(GradientOptimizer):
    """The methods of an optimizer made by ``LocalOptimizer``."""

    _horovod: LocalReduction
    _part = LocalReduction

    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients over the ranks of this host, make a step, and exchange what is due with the other hosts.

        Every rank must call it. The arguments, the result and the errors are those of ``DistributedOptimizer``.
        """
        self._horovod.begin_step()
        return super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # a function's attribute

    def finish_round(self) -> None:
        """Give all ranks the average of the hosts' parameters, for example at the end of training. Every rank must call it.

        Fragments on their way are applied first. The outer momentum stays as it is, and training may go on.

        Raises:
            HorovodInternalError: the reduction failed.
            MismatchError: the outer parameters of the hosts differ, and ``HOROVOD_CHECK=error``.
        """
        self._horovod.catch_up()
        self._horovod.rounds.finish()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under a key of its own the outer state, which is equal on all ranks.

        It waits for fragments that are on their way, but no other rank need call it. The parameters of the model and the
        wrapped optimizer's state differ between hosts: to continue exactly where training was interrupted, save both on one
        rank of each host. An optimizer without Horovod can load the result, and ignores the outer state.
        """
        return {**super().state_dict(), **self._horovod.saved()}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state and the outer state, and abandon the present step. All ranks must call it.

        A state without an outer one begins local training anew, with the parameters of the next step.

        Raises:
            ValueError: the outer state is of other parameters.
        """
        plain = {key: value for key, value in state_dict.items() if key not in (OUTER, MEMORY)}
        super().load_state_dict(plain, *args, **kwargs)
        self._horovod.load(state_dict.get(OUTER), state_dict.get(MEMORY))

    def load_wrapped(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state alone."""
        plain = {key: value for key, value in state_dict.items() if key not in (OUTER, MEMORY)}
        super().load_state_dict(plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(_NO_COPIES)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(_NO_COPIES)


_NO_COPIES = (
    "an optimizer of hvd.LocalOptimizer cannot be copied or pickled, since all ranks have its outer parameters; copy its "
    "state_dict() instead"
)
