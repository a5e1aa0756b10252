"""``horovod.common.util``: small functions that existing scripts import."""

from __future__ import annotations

import contextlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from horovod.comm.engine import is_at_least, version_of
from horovod.common import basics
from horovod.common.basics import module_available
from horovod.core.errors import HorovodVersionMismatchError, get_version_mismatch_message
from horovod.observe.call_site import warn

__all__ = [
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

_T = TypeVar("_T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the binding of a framework (``torch``, ``tensorflow``, ``mxnet``) can be imported."""
    available = module_available(ext_base_name) and module_available(f"horovod.{ext_base_name}")
    if verbose:
        print(f"horovod.{ext_base_name} is {'' if available else 'not '}available")
    return available


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether collectives can move a framework's tensors between GPUs: its binding supports this, and NCCL is installed."""
    hands_over = ext_base_name in ("torch", "tensorflow")
    return _reported(f"GPU support of {ext_base_name}", hands_over and basics.nccl_built() > 0, verbose)


def _reported(name: str, built: _T, verbose: bool) -> _T:
    if verbose:
        print(f"{name} is {'' if built else 'not '}available")
    return built


def mpi_built(verbose: bool = False) -> bool:
    """As :func:`horovod.common.basics.mpi_built`."""
    return _reported("MPI", basics.mpi_built(), verbose)


def gloo_built(verbose: bool = False) -> bool:
    """As :func:`horovod.common.basics.gloo_built`."""
    return _reported("Gloo", basics.gloo_built(), verbose)


def nccl_built(verbose: bool = False) -> int:
    """As :func:`horovod.common.basics.nccl_built`."""
    return _reported("NCCL", basics.nccl_built(), verbose)


def ddl_built(verbose: bool = False) -> bool:
    """As :func:`horovod.common.basics.ddl_built`."""
    return _reported("DDL", basics.ddl_built(), verbose)


def ccl_built(verbose: bool = False) -> bool:
    """As :func:`horovod.common.basics.ccl_built`."""
    return _reported("oneCCL", basics.ccl_built(), verbose)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Check that a framework is installed. Nothing has to be built.

    Args:
        ext_name: the binding, for example ``horovod.torch``.
        ext_env_var, pkg_path: accepted for compatibility.

    Raises:
        ImportError: its framework cannot be imported.
    """
    framework = ext_name.rpartition(".")[2]
    if not module_available(framework):
        raise ImportError(f"Extension {ext_name} has not been built: {framework} is not installed here.")


def get_ext_suffix() -> str:
    """The suffix of compiled extension modules for this Python, such as ``.so``. Horovod itself has none."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """The path of an extension module: ``args`` below the folder of ``pkg_path``, with this Python's suffix."""
    return f"{Path(pkg_path).parent.joinpath(*args)}{get_ext_suffix()}"


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Warn if framework ``name`` is installed in another version than ``version``.

    Raises:
        HorovodVersionMismatchError: the versions differ, and importing the binding has failed with ``exception``.
    """
    installed = version_of(name)
    if installed in ("", version):
        return
    if exception is not None:
        raise HorovodVersionMismatchError(name, version, installed) from exception
    warn(get_version_mismatch_message(name, version, installed))


@contextlib.contextmanager
def env(**kwargs: str) -> Iterator[None]:
    """Environment variables for the duration of a block."""
    before = {name: os.environ.get(name) for name in kwargs}
    os.environ.update(kwargs)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """The rule by which ``average=`` and ``op=`` become one: ``f(op, average) -> op``.

    Args:
        reduce_ops: anything with attributes ``Average`` and ``Sum``.
    """

    def decide(op: Any, average: bool | None) -> Any:
        """The reduction that ``op=`` and the older ``average=`` ask for; neither: Average.

        Raises:
            ValueError: both are given.
        """
        if op is not None:
            if average is not None:
                raise ValueError("The op parameter supersedes average. Please provide only one of them.")
            return op
        if average is None:
            return reduce_ops.Average
        warn("Parameter `average` has been replaced with `op`: hvd.Average or hvd.Sum", DeprecationWarning)
        return reduce_ops.Average if average else reduce_ops.Sum

    return decide


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[_T], n: int) -> list[list[_T]]:
    """Cut a list into ``n`` consecutive parts of nearly equal length, the longer ones first."""
    base, extra = divmod(len(items), n)
    parts, start = [], 0
    for number in range(n):
        stop = start + base + (number < extra)
        parts.append(list(items[start:stop]))
        start = stop
    return parts


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is ``target`` or newer; both as ``major.minor.patch`` with any suffix."""
    return is_at_least(ver, target)
