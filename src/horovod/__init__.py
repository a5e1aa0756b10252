"""Distributed data-parallel training: one script, one command, many processes.

The bindings are ``horovod.torch`` and its siblings. This package itself has only :func:`horovod.run` and versions. ``run``
is imported when it is first used, so ``import horovod`` imports neither the launcher nor a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod._base import version as _version

if TYPE_CHECKING:
    from horovod.runner import run as run

__version__ = _version.INTERFACE
__all__ = ["build_info", "run", "__version__"]


def build_info() -> dict[str, str]:
    """The version of this Horovod and where it is installed.

    Returns:
        ``interface``: the version of the interface, the same as ``horovod.__version__``; ``version``: the version of the
        installed distribution, with this implementation's own number; ``path``: the folder that it is imported from.
    """
    return {"interface": __version__, "version": _version.VERSION, "path": __path__[0]}


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "run"})
