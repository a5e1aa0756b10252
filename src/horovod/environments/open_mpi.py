"""Ranks started by Open MPI's ``mpirun``, versions 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping

from horovod._base.process_identity import ProcessIdentity
from horovod.environments.base import Environment, EnvironmentVariables, consecutive


class OpenMPI(Environment):
    name = "Open MPI"
    over_mpi = True

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        return "OMPI_COMM_WORLD_RANK" in env

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = EnvironmentVariables(
            env, OpenMPI.name, "start the script with `mpirun -np N python ...` and leave its variables as they are."
        )
        rank = read.number("OMPI_COMM_WORLD_RANK")
        size = read.number("OMPI_COMM_WORLD_SIZE")
        local_size = read.number("OMPI_COMM_WORLD_LOCAL_SIZE")
        cross_rank, cross_size = consecutive(rank, size, local_size)
        # Version 5 names the job through PMIx, version 4 through its own runtime; both names hold mpirun's process id.
        job = read.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
        if not job:
            raise read.error("neither PMIX_NAMESPACE nor OMPI_MCA_ess_base_jobid says which job this is")
        return read.identity(
            rank=rank,
            size=size,
            local_rank=read.number("OMPI_COMM_WORLD_LOCAL_RANK"),
            local_size=local_size,
            cross_rank=cross_rank,
            cross_size=cross_size,
            hostname=read.hostname("PMIX_HOSTNAME"),
            job=f"open-mpi/{job}",
            local_ranks_known=False,
        )
