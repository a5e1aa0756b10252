"""Ranks started by MPICH's Hydra (``mpiexec``, ``mpirun``) and by its relatives, such as Intel MPI. They use PMI."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from horovod._base.process_identity import ProcessIdentity
from horovod.environments.base import Environment, EnvironmentVariables, consecutive
from horovod.environments.slurm import Slurm

# One proxy runs per host and job, so the proxy is the nearest ancestor that all ranks of a host share and no other job has.
_LAUNCHERS = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpirun")


class MPICH(Environment):
    name = "MPICH"
    over_mpi = True

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        if "PMI_RANK" not in env or "PMI_SIZE" not in env:
            return False
        # Slurm's own PMI sets these two variables as well; Hydra always adds the local rank.
        return "MPI_LOCALRANKID" in env or not Slurm.detect(env)

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = EnvironmentVariables(
            env, MPICH.name, "start the script with `mpiexec -n N python ...` and leave its variables as they are."
        )
        rank = read.number("PMI_RANK")
        size = read.number("PMI_SIZE")
        local_size = read.number("MPI_LOCALNRANKS")
        cross_rank, cross_size = consecutive(rank, size, local_size)
        launcher = _launcher_process()
        if launcher is None:
            raise read.error(
                f"none of {', '.join(_LAUNCHERS)} is an ancestor of this process, so its job cannot be identified"
            )
        return read.identity(
            rank=rank,
            size=size,
            local_rank=read.number("MPI_LOCALRANKID"),
            local_size=local_size,
            cross_rank=cross_rank,
            cross_size=cross_size,
            hostname=read.hostname("PMI_HOSTNAME"),
            job=f"mpich/{launcher}",
            local_ranks_known=False,
        )


def _launcher_process() -> str | None:
    """Process id and start time of the launcher above this process, the same text on every rank of the host."""
    import psutil

    try:
        for ancestor in psutil.Process().parents():
            if ancestor.name().startswith(_LAUNCHERS):
                return f"{ancestor.pid}/{_start_time(ancestor.pid)}"
    except (psutil.Error, OSError):  # an ancestor has ended meanwhile: the job is ending
        return None
    return None


def _start_time(pid: int) -> str:
    # In ticks since boot: psutil's wall-clock time changes when the clock is set, and then ranks would disagree.
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        return stat.read_text(errors="replace").rpartition(")")[2].split()[19]
    import psutil

    return str(psutil.Process(pid).create_time())
