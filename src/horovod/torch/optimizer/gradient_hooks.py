"""The hooks of a parameter, which notify an optimizer when a backward pass has added to its gradient, and before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

_ours: set[int] = set()
"""PyTorch's identifiers of the hooks that optimizers of this process have registered."""
_coming: dict[int, Any] = {}
"""By identifier of such a hook, PyTorch's handle of the hook that is called before backward adds to the gradient."""


def _stop_coming(identifier: int) -> None:
    handle = _coming.pop(identifier, None)
    if handle is not None:
        handle.remove()


@contextmanager
def _trained(parameter: torch.Tensor) -> Iterator[None]:
    """A context in which a frozen parameter is trained, because PyTorch refuses hooks on tensors that require no gradient."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            parameter.requires_grad_(False)


class GradientHook:
    """Calls ``heard(parameter)`` whenever a backward pass has added to the parameter's gradient.

    If several optimizers share a parameter, the one made last has the hook. A frozen parameter has a hook, too, so that the
    optimizer notices its first gradient once it is unfrozen.

    Args:
        parameter: the parameter.
        heard: a plain function, because PyTorch takes three times as long to call an object. It must not refer to the
            optimizer, because the parameter refers to ``heard``.

    Attributes:
        changes: how often an optimizer of this process has replaced the hook of another optimizer, or has removed a hook.
        implementation: the address of PyTorch's C++ tensor that the hook is registered with.
    """

    __slots__ = ("_handle", "_parameter", "implementation")
    changes: ClassVar[int] = 0

    def __init__(self, parameter: torch.Tensor, heard: Callable[[torch.Tensor], None]) -> None:
        self._parameter: Any = parameter  # PyTorch does not type its hooks
        for other in _ours.intersection(self._parameter._post_accumulate_grad_hooks or ()):
            del self._parameter._post_accumulate_grad_hooks[other]
            _stop_coming(other)
            GradientHook.changes += 1
        with _trained(parameter):
            register: Callable[[Callable[[torch.Tensor], None]], Any] = (
                self._parameter.register_post_accumulate_grad_hook
            )
            self._handle = register(heard)
        self.implementation: int = self._parameter._cdata
        _ours.add(self._handle.id)

    def precede(self, coming: Callable[[torch.Tensor], None]) -> None:
        """Call ``coming`` with each new part of the gradient before backward adds it, if the hook is registered. Can be called
        again. ``coming`` must not refer to the optimizer either."""
        if self._handle.id not in _coming and self.is_registered():
            with _trained(self._parameter):
                _coming[self._handle.id] = self._parameter.register_hook(coming)

    def is_registered(self) -> bool:
        """Whether no other optimizer has replaced the hook with its own."""
        return self._handle.id in self._parameter._post_accumulate_grad_hooks

    def restore(self) -> None:
        """Register the hooks with the parameter's present C++ tensor.

        ``module.to()`` with parameter swapping gives a parameter another C++ tensor, which has no hooks.
        """
        self.implementation = self._parameter._cdata
        self._parameter._post_accumulate_grad_hooks = self._parameter._post_accumulate_grad_hooks
        if self._handle.id in _coming:
            self._parameter._backward_hooks = self._parameter._backward_hooks

    def remove(self) -> None:
        GradientHook.changes += 1
        self._handle.remove()
        _stop_coming(self._handle.id)
        _ours.discard(self._handle.id)
