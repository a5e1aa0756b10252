"""The hook by which an optimizer hears of a parameter's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from horovod.torch.buckets import Slot


class Listener(Protocol):
    """Who wants to know."""

    def gradient_is_ready(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A backward pass has added to the gradient of the parameter of ``slot``."""


class GradientHook:
    """Tells ``listener()`` whenever a backward pass has added to a parameter's gradient.

    Of several optimizers over one parameter, the one made last hears of it; the others send it in their ``step()``.

    Args:
        listener: a weak reference, for a parameter must not keep an optimizer alive.
    """

    def __init__(self, slot: Slot, listener: Callable[[], Listener | None]) -> None:
        self._parameter: Any = slot.parameter  # PyTorch leaves its hooks untyped
        self._slot = slot
        self._listener = listener
        hooks = self._parameter._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
            del hooks[key]
        register: Callable[[GradientHook], Any] = self._parameter.register_post_accumulate_grad_hook
        self._handle = register(self)
        self._implementation: int = self._parameter._cdata

    def __call__(self, parameter: torch.Tensor) -> None:
        listener, gradient = self._listener(), parameter.grad
        if listener is not None and gradient is not None:
            listener.gradient_is_ready(self._slot, gradient)

    def is_heard(self) -> bool:
        """Whether no other optimizer has taken the parameter over."""
        return self in self._parameter._post_accumulate_grad_hooks.values()

    def restore(self) -> None:
        """After ``module.to()`` with parameter swapping the parameter has another implementation, which calls no hooks."""
        if self._parameter._cdata != self._implementation:
            self._implementation = self._parameter._cdata
            self._parameter._post_accumulate_grad_hooks = self._parameter._post_accumulate_grad_hooks

    def remove(self) -> None:
        self._handle.remove()
