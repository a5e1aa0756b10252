"""Excludes code from PyTorch's compiler: collectives that a waiting thread executes itself, groups of ``torch.distributed``,
and gradient hooks.

Inside a compiled function the compiler traces every Python function that runs on the thread, also after a graph break. It must
not compile the code that executes collectives.

With compiled autograd, a whole backward pass is such a function, hooks included. PyTorch calls nothing at its end, so nothing
can reduce the gradients before the script uses them. Leaving the compiled code in every hook is no solution: compiling this
takes a minute for 16 parameters. So such passes are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

from horovod.core.requests.handle import Driver, Handle

is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
"""Whether the compiler traces the calling function. PyTorch before 2.3 has this function under a private name."""

is_traced: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", None) or is_compiling
"""The same, for hooks: it takes less time if nothing is compiled. PyTorch before 2.3 does not have this function."""

_COMPILED_BACKWARD = (
    "The gradient of {name!r} comes from a backward pass with compiled autograd, which does not report its end, so "
    "gradients cannot be reduced before the script uses them. Switch it off (torch._dynamo.config.compiled_autograd = False, "
    "no torch._dynamo.compiled_autograd), and call backward() outside compiled functions. torch.compile of models and losses "
    "works."
)
_callback: Callable[[], Any] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
"""Returns the compiler's callback if it traces this thread, else None. PyTorch that is too old to tell does not have it."""
_uncompiled: dict[Callable[..., None], Callable[..., None]] = {}


def drive(driver: Driver, handle: Handle) -> None:
    """Call ``driver.drive(handle)`` without compiling it."""
    if "torch._dynamo" not in sys.modules or not (is_compiling() or _callback is None or _callback() is not None):
        driver.drive(handle)
        return
    _call(_drive, driver, handle)


def refuse_compiled(name: str) -> None:
    """Called by a gradient hook that is being traced, with the name of the parameter.

    Raises:
        AssertionError: raised when the compiled code runs.
    """
    _call(refuse_backward, name)


def refuse_backward(name: str) -> None:
    """Raise AssertionError, because the gradient of the parameter ``name`` comes from compiled autograd."""
    raise AssertionError(_COMPILED_BACKWARD.format(name=name))


def in_compiled_backward() -> bool:
    """Whether this process runs a backward pass of compiled autograd."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


_Made = TypeVar("_Made", bound="type | Callable[..., Any]")


def uncompiled(made: _Made) -> _Made:
    """Decorator: the compiler skips a function, or the methods of a class, and everything that they call.

    It marks their code, which does not load the compiler. PyTorch before 2.6 can only skip the functions themselves.
    """
    for value in [made] if isinstance(made, FunctionType) else vars(made).values():
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, FunctionType):
            _skip(function.__code__)
    return made


def _skip(code: CodeType) -> None:
    compiler: Any = torch._C._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip))
    else:
        compiler.skip_code(code)


def _call(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of this module without compiling it. The compiler may trace the calling function."""
    if function not in _uncompiled:
        disable: Any = torch.compiler.disable
        _uncompiled[function] = disable(function)
    _uncompiled[function](*arguments)


def _drive(driver: Driver, handle: Handle) -> None:
    driver.drive(handle)
