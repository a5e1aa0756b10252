"""``horovod.tensorflow.util``: small functions that existing scripts import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

_F = TypeVar("_F", bound=Callable[..., Any])


def _executing_eagerly() -> bool:
    """Whether eager execution is on."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """``tf.function(f)``."""
    return tf.function(f)


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function's results by its arguments. If these cannot be hashed, the key is their ``repr``."""
    known: dict[Any, Any] = {}

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        key: Any = (args, frozenset(kwargs.items()), _executing_eagerly())
        try:
            hash(key)
        except TypeError:
            key = repr(key)
        if key not in known:
            known[key] = f(*args, **kwargs)
        return known[key]

    return wrapper


def vars_to_refs(vars: Any) -> Any:
    """Hashable references to variables. Lists become tuples."""
    if isinstance(vars, list):
        return tuple(vars_to_refs(variable) for variable in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables of references. Tuples become lists."""
    if isinstance(refs, tuple):
        return [refs_to_vars(reference) for reference in refs]
    return refs.deref()


__all__: Sequence[str] = ["refs_to_vars", "vars_to_refs"]
