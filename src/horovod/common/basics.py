"""The functions that every binding exports: start and end of the runtime, ranks and sizes, and installed features."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import Any

from horovod._base.config import DYNAMIC_PROCESS_SETS
from horovod.comm import select
from horovod.comm.base import DeviceFailure
from horovod.comm.nccl import library
from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle import context
from horovod.core.lifecycle.process_set import ProcessSet, membership
from horovod.core.submission.arguments import flag_value, shown
from horovod.environments import identity


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Start Horovod. Every rank of the job must call it before any other function.

    Args:
        comm: which processes make up the job. None or an empty list: all that were launched. A list of ranks of the launched
            job, the same on each of them: these alone, numbered in the order of the list. An ``mpi4py.MPI.Comm``: its
            processes, numbered as it numbers them. Jobs that share no process run side by side.
        process_sets: subsets that run collectives of their own; every rank passes the same list in the same order. Or
            ``"dynamic"``: there are none yet, but :func:`add_process_set` may add some.

    Raises:
        TypeError: ``process_sets`` is not a list.
        ValueError: the environment contradicts itself, ranks contradict each other, or ``comm`` is none of these or does not
            contain this process.
        NotImplementedError: a process set is made from a communicator, and ``comm`` is not.
        TimeoutError: ranks did not call it in time; the message names them.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f'process_sets={process_sets!r}: pass a list of hvd.ProcessSet, or "dynamic" to add sets later'
            )
        os.environ[DYNAMIC_PROCESS_SETS] = "1"
        process_sets = None
    if process_sets is not None and not isinstance(process_sets, Iterable):
        raise TypeError(f"process_sets={shown(process_sets)}: pass a list of hvd.ProcessSet")
    context.init(identity, [] if process_sets is None else list(process_sets), comm)


def shutdown() -> None:
    """Stop Horovod on this rank, and so on all ranks. Does nothing if it does not run."""
    context.shutdown()


def is_initialized() -> bool:
    """Whether ``init()`` was called and ``shutdown()`` was not. Never raises."""
    return context.is_initialized()


def size() -> int:
    """The number of processes of the job. Raises ValueError before ``init()``."""
    return context.current().identity.size


def local_size() -> int:
    """The number of processes of the job on this host. Raises ValueError before ``init()``."""
    return context.current().identity.local_size


def cross_size() -> int:
    """The number of hosts that have a process of this local rank. Raises ValueError before ``init()``."""
    return context.current().identity.cross_size


def rank() -> int:
    """This process's number in the job, from 0. Raises ValueError before ``init()``."""
    return context.current().identity.rank


def local_rank() -> int:
    """This process's number on its host, from 0. Raises ValueError before ``init()``."""
    return context.current().identity.local_rank


def cross_rank() -> int:
    """This host's number among those that have a process of this local rank. Raises ValueError before ``init()``."""
    return context.current().identity.cross_rank


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start a timeline, which rank 0 writes to ``file_path``. All ranks call it.

    Args:
        file_path: the file, on the host of rank 0.
        mark_cycles: also mark every time the coordinator sends orders.

    Raises:
        TypeError: ``file_path`` is not a path.
        ValueError: not initialised, HOROVOD_TIMELINE was not set at ``init()`` (set it to DYNAMIC), or no file can have this
            name.
    """
    path = os.fsdecode(file_path)  # checked on every rank, though only rank 0 writes the file
    if b"\0" in os.fsencode(path) or not path:
        raise ValueError(f"file_path={shown(file_path)}: no file can have this name")
    context.current().recording.start(path, flag_value(mark_cycles, "mark_cycles"))


def stop_timeline() -> None:
    """Stop the timeline and complete its file. All ranks call it. Does nothing if none is written.

    Raises:
        ValueError: not initialised.
    """
    context.current().recording.stop()


def is_homogeneous() -> bool:
    """Whether every host runs the same number of the job's processes. Raises ValueError before ``init()``."""
    return context.current().is_homogeneous()


def mpi_threads_supported() -> bool:
    """Whether several threads of this process may call MPI at the same time, with any engine.

    If an MPI launcher has started this process, and MPI does not run in it yet, it is whether the library that mpi4py loads
    allows this.

    Raises:
        ValueError: Horovod does not run; or MPI does not run, and no MPI launcher has started this process or mpi4py cannot
            load MPI.
    """
    generation = context.current()
    from horovod.comm.mpi import runtime  # not before: few processes need it

    if mpi_enabled() or runtime.is_running():
        return runtime.threads_supported()
    if not runtime.launched():
        raise ValueError("Horovod MPI is not enabled; this job does not use MPI, and no MPI launcher has started it.")
    return not generation.config.mpi_threads_disable and runtime.library_supports_threads()


def mpi_enabled() -> bool:
    """Whether collectives of the running job go over MPI (``HOROVOD_CPU_OPERATIONS=MPI``); False before ``init()``."""
    if not context.is_initialized():
        return False
    return any("mpi" in worker.communicator.engines() for worker in context.current().workers.values())


def mpi_built() -> bool:
    """Whether collectives can run over MPI: mpi4py is installed. ``init()`` checks whether the job was started for that."""
    return bool(select.engine("mpi").installed())


def gloo_enabled() -> bool:
    """Whether the job runs on Horovod's own control plane, which scripts know as Gloo."""
    return context.is_initialized()


def gloo_built() -> bool:
    """Whether jobs can run on Horovod's own control plane: always."""
    return True


def nccl_built() -> int:
    """The version code of the NCCL or RCCL that Horovod would use, for example 22705; 0 if there is none."""
    try:
        return library.loaded().version()
    except (OSError, DeviceFailure):
        return 0


def ddl_built() -> bool:
    """Whether collectives can run over IBM's DDL: not in this version."""
    return False


def ccl_built() -> bool:
    """Whether collectives can run over oneCCL: its library is installed."""
    return bool(select.engine("ccl").installed())


def cuda_built() -> bool:
    """Whether an engine can move the memory of CUDA devices itself: NCCL is installed. True also without a GPU."""
    return bool(nccl_built()) and "nccl" in library.find()


def rocm_built() -> bool:
    """As :func:`cuda_built`, for ROCm devices and RCCL."""
    return bool(nccl_built()) and "rccl" in library.find()


def module_available(name: str) -> bool:
    """Whether a module can be imported. Does not import it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class HorovodBasics:
    """The functions of this module, and the reductions, as an object: ``mpi_ops._basics`` of a binding, and what scripts make.

    Args:
        pkg_path, args: accepted for compatibility. They say where the C library is, which does not exist here.
    """

    Average = int(ReduceOp.AVERAGE)
    Sum = int(ReduceOp.SUM)
    Adasum = int(ReduceOp.ADASUM)
    Min = int(ReduceOp.MIN)
    Max = int(ReduceOp.MAX)
    Product = int(ReduceOp.PRODUCT)

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        pass

    init = staticmethod(init)
    shutdown = staticmethod(shutdown)
    is_initialized = staticmethod(is_initialized)
    size = staticmethod(size)
    local_size = staticmethod(local_size)
    cross_size = staticmethod(cross_size)
    rank = staticmethod(rank)
    local_rank = staticmethod(local_rank)
    cross_rank = staticmethod(cross_rank)
    start_timeline = staticmethod(start_timeline)
    stop_timeline = staticmethod(stop_timeline)
    is_homogeneous = staticmethod(is_homogeneous)
    mpi_threads_supported = staticmethod(mpi_threads_supported)
    mpi_enabled = staticmethod(mpi_enabled)
    mpi_built = staticmethod(mpi_built)
    gloo_enabled = staticmethod(gloo_enabled)
    gloo_built = staticmethod(gloo_built)
    nccl_built = staticmethod(nccl_built)
    ddl_built = staticmethod(ddl_built)
    ccl_built = staticmethod(ccl_built)
    cuda_built = staticmethod(cuda_built)
    rocm_built = staticmethod(rocm_built)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The registered process sets: their ranks by number."""
        context.current()
        return {number: list(ranks) for number, ranks in membership.ranks.items()}

    def _process_set_size(self, process_set_id: int) -> int:
        return len(self._ranks_of(process_set_id))

    def _process_set_rank(self, process_set_id: int) -> int:
        ranks = self._ranks_of(process_set_id)
        if rank() not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(rank())

    def _ranks_of(self, process_set_id: int) -> list[int]:
        ranks = self._get_process_set_ids_and_ranks().get(process_set_id)
        if ranks is None:
            raise ValueError(f"Process set {process_set_id} does not exist, or has not been registered.")
        return ranks

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"HorovodBasics has no {name}: this Horovod is pure Python and has no C library; use the functions of hvd"
        )
