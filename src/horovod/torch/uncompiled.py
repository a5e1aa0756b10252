"""Excludes code of this package from PyTorch's compiler.

Inside a compiled function the compiler traces every Python function that runs on the thread, also after a graph break. The code
that submits and executes collectives must not be compiled: that takes seconds, longer the more collectives are prepared, as
the compiler looks at every object that this code reads. So whatever a compiled function can call is excluded: public functions,
the distributed parts of optimizers, gradient hooks, and groups of ``torch.distributed``. A call of them is a graph break.

With compiled autograd, a whole backward pass is a compiled function. PyTorch calls nothing at its end, so nothing can reduce
the gradients before the script uses them. Such passes are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from inspect import unwrap
from types import FunctionType
from typing import Any, TypeVar

import torch

_COMPILED_BACKWARD = (
    "The gradient of {name!r} comes from a backward pass with compiled autograd, which does not report its end, so "
    "gradients cannot be reduced before the script uses them. Switch it off (torch._dynamo.config.compiled_autograd = False, "
    "no torch._dynamo.compiled_autograd). torch.compile of models, losses and whole steps works."
)
_REASON = "horovod executes collectives without compiling them"
_compiler: Any = torch._C._dynamo.eval_frame
_SKIPS_CALLEES = hasattr(_compiler, "set_code_exec_strategy")
"""Whether the compiler can skip all that a function calls. PyTorch before 2.6 only skips the function itself."""


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

    It does what ``torch.compiler.disable`` does, without loading the compiler, which takes seconds.
    """
    if not isinstance(made, type):
        function: _Made = _excluded(made)
        return function
    for name, value in list(vars(made).items()):
        if isinstance(value, FunctionType):
            setattr(made, name, _excluded(value))
        elif isinstance(value, (staticmethod, classmethod)):
            setattr(made, name, type(value)(_excluded(value.__func__)))
        elif isinstance(value, property) and value.fget is not None:
            setattr(made, name, value.getter(_excluded(value.fget)))
    return made


def share_uncompiled(namespace: dict[str, Any], *functions: Callable[..., Any]) -> None:
    """Exclude functions that all bindings share. ``namespace`` is that of the module of this binding that exports them."""
    namespace.update({each.__name__: uncompiled(each) for each in functions})


def traceable(method: _Made) -> _Made:
    """Decorator of a method that calls that of a wrapped optimizer: the compiler may take both into its graphs. PyTorch before
    2.6 skips them, because it fails to continue such a method after a graph break."""
    return method if _SKIPS_CALLEES else uncompiled(method)


def _excluded(function: Any) -> Any:
    """The function, or what is to be called instead of it."""
    if _SKIPS_CALLEES:
        skip = _compiler._FrameAction.SKIP
        code = unwrap(function).__code__  # that of a decorator such as contextmanager() is not ours
        _compiler.set_code_exec_strategy(code, _compiler._FrameExecStrategy(skip, skip))
        alone = function
    else:

        def alone(*args: Any, **kwargs: Any) -> Any:
            before = _compiler.set_eval_frame(None)
            try:
                return function(*args, **kwargs)
            finally:
                _compiler.set_eval_frame(before)

        _compiler.skip_code(alone.__code__)
        update_wrapper(alone, function)
    alone._torchdynamo_disable = True  # the compiler breaks its graph where it meets a call
    alone._torchdynamo_disable_msg = _REASON
    return alone
