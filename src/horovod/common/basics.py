"""The functions every binding exports: life of the runtime, topology, and what this installation can do."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import Any

from horovod.core import context
from horovod.core.config import DYNAMIC_PROCESS_SETS
from horovod.core.process_set import ProcessSet


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Start Horovod. Every rank of the job must call it, before anything else of Horovod.

    Args:
        comm: None or an empty list for all processes.
        process_sets: subsets that run collectives of their own; every rank passes the same list in the same order. Or
            ``"dynamic"``: there are none yet, but :func:`add_process_set` may add some.

    Raises:
        ValueError: the environment contradicts itself, or ranks contradict each other.
        TimeoutError: some ranks did not come in time; the message names them.
    """
    if comm is not None and not (isinstance(comm, list | tuple) and not comm):
        if not isinstance(comm, Iterable) and not hasattr(comm, "Get_rank"):
            raise ValueError(f"Invalid type of argument comm: {type(comm).__name__}; pass None for all processes")
        raise NotImplementedError(
            "init(comm=...): sub-communicators are not available in this version; pass process_sets"
        )
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f'process_sets={process_sets!r}: pass a list of hvd.ProcessSet, or "dynamic" to add sets later'
            )
        os.environ[DYNAMIC_PROCESS_SETS] = "1"
        process_sets = None
    context.init(None if process_sets is None else list(process_sets))


def shutdown() -> None:
    """Stop Horovod on this rank, which ends it on all ranks. Harmless when it does not run."""
    context.shutdown()


def is_initialized() -> bool:
    """Whether ``init()`` was called and ``shutdown()`` was not. Never raises."""
    return context.is_initialized()


def size() -> int:
    """How many processes the job has. Raises ValueError before ``init()``."""
    return context.current().identity.size


def local_size() -> int:
    """How many processes of the job run on this host. Raises ValueError before ``init()``."""
    return context.current().identity.local_size


def cross_size() -> int:
    """On how many hosts a process has this one's local rank. Raises ValueError before ``init()``."""
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


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Let rank 0 write a timeline to ``file_path`` from now on. Called on all ranks.

    Args:
        mark_cycles: also mark every time the coordinator sends orders.

    Raises:
        ValueError: not initialised, or HOROVOD_TIMELINE was not set at ``init()`` (set it to DYNAMIC).
    """
    context.current().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline and complete its file. Called on all ranks; harmless when none is written.

    Raises:
        ValueError: not initialised.
    """
    context.current().stop_timeline()


def is_homogeneous() -> bool:
    """Whether every host runs the same number of the job's processes. Raises ValueError before ``init()``."""
    return context.current().is_homogeneous()


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads.

    Raises:
        ValueError: Horovod does not run, or runs without MPI, as it always does in this version.
    """
    context.current()
    raise ValueError("Horovod MPI is not enabled; this job does not use MPI.")


def mpi_enabled() -> bool:
    """Whether the running job uses MPI: not in this version."""
    return False


def mpi_built() -> bool:
    """Whether collectives can run over MPI: not in this version."""
    return False


def gloo_enabled() -> bool:
    """Whether the job runs without MPI, on Horovod's own control plane, which is what scripts mean when they ask for Gloo."""
    return context.is_initialized()


def gloo_built() -> bool:
    """Whether jobs can run without MPI: always, on Horovod's own control plane."""
    return True


def nccl_built() -> int:
    """The version code of the NCCL engine, 0 while there is none."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL is used: never."""
    return False


def ccl_built() -> bool:
    """Whether collectives can run over oneCCL: not in this version."""
    return False


def cuda_built() -> bool:
    """Whether collectives run on CUDA devices: not in this version."""
    return False


def rocm_built() -> bool:
    """Whether collectives run on ROCm devices: not in this version."""
    return False


def module_available(name: str) -> bool:
    """Whether a module could be imported; it is not."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
