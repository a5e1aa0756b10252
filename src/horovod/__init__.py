"""Distributed data-parallel training: one script, one command, many processes.

The bindings are ``horovod.torch`` and its siblings. This package itself has only :func:`horovod.run` and the version. ``run``
is imported when it is first used, so ``import horovod`` imports neither the launcher nor a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.runner import run as run

__version__ = "0.29.0"
__all__ = ["run", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "run"})
