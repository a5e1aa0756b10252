"""The methods of an optimizer whose ranks reduce gradients inside their host, and parameters across hosts."""

from __future__ import annotations

from typing import Any, NoReturn

from horovod.torch.optimizer.compressor_state import MEMORY
from horovod.torch.optimizer.gradient_optimizer import GradientOptimizer
from horovod.torch.optimizer.gradient_reduction import GradientReduction
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.local_parameters import LocalParameters
from horovod.torch.optimizer.local_settings import LocalSettings
from horovod.torch.optimizer.local_steps import OUTER, LocalSteps
from horovod.torch.optimizer.settings import OptimizerSettings
from horovod.torch.uncompiled import traceable


class LocalGradientOptimizer(GradientOptimizer):
    """The methods of an optimizer made by ``LocalOptimizer``."""

    _horovod_local: LocalSteps

    def _distribute(self, settings: OptimizerSettings, identity: OptimizerIdentity) -> None:
        assert isinstance(settings, LocalSettings), "LocalOptimizer makes it"
        parameters = LocalParameters(self, settings, identity)
        self._horovod = GradientReduction(parameters)
        self._horovod_local = LocalSteps(parameters, settings)

    def _horovod_before_scaler(self) -> None:
        self._horovod_local.catch_up()
        super()._horovod_before_scaler()
        self._horovod_local.begin_with_scaler()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self._horovod_local.discard()
        super().zero_grad(set_to_none)

    @traceable
    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients over the ranks of this host, make a step, and exchange what is due with the other hosts.

        Every rank must call it. The arguments, the result and the errors are those of ``DistributedOptimizer``.
        """
        self._horovod_local.begin()
        result = super().step(closure)
        self._horovod_local.end()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # a function's attribute

    def finish_round(self) -> None:
        """Give all ranks the average of the hosts' parameters, for example at the end of training. Every rank must call it.

        Fragments on their way are applied first. The outer momentum stays as it is, and training may go on.

        Raises:
            HorovodInternalError: the reduction failed.
            MismatchError: the outer parameters of the hosts differ, and ``HOROVOD_CHECK=error``.
        """
        self._horovod_local.finish()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under a key of its own the outer state, which is equal on all ranks.

        It waits for fragments that are on their way, but no other rank need call it. The parameters of the model and the
        wrapped optimizer's state differ between hosts: to continue exactly where training was interrupted, save both on one
        rank of each host. An optimizer without Horovod can load the result, and ignores the outer state.
        """
        return {**super().state_dict(), **self._horovod_local.saved()}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state and the outer state, and abandon the present step. All ranks must call it.

        A state without an outer one begins local training anew, with the parameters of the next step.

        Raises:
            ValueError: the outer state is of other parameters.
        """
        plain = {key: value for key, value in state_dict.items() if key not in (OUTER, MEMORY)}
        super().load_state_dict(plain, *args, **kwargs)
        self._horovod_local.load(state_dict)

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
