"""Ranks started on Cray systems: by PALS (``mpiexec``, ``aprun``), or by the older ALPS (``aprun``).

PALS gives each process its rank. The number of ranks comes from PMI, which PALS offers unless ``mpiexec --pmi`` says otherwise.
ALPS alone does not tell enough.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod._base.process_identity import ProcessIdentity
from horovod.environments.base import Environment, EnvironmentVariables, consecutive


class PALS(Environment):
    name = "PALS"
    over_mpi = True

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        return "PALS_RANKID" in env or "ALPS_APP_PE" in env

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = EnvironmentVariables(
            env,
            PALS.name,
            "it must give PMI_SIZE, PALS_LOCAL_RANKID and PALS_LOCAL_SIZE. Set missing variables by hand, as in "
            "`mpiexec -n 8 --env PMI_SIZE=8 python ...`.",
        )
        rank = read.number("PALS_RANKID" if env.get("PALS_RANKID") else "ALPS_APP_PE")
        size = read.number("PMI_SIZE")
        local_size = read.number("PALS_LOCAL_SIZE" if env.get("PALS_LOCAL_SIZE") else "PMI_LOCAL_SIZE")
        cross_rank, cross_size = consecutive(rank, size, local_size)
        return read.identity(
            rank=rank,
            size=size,
            local_rank=read.number("PALS_LOCAL_RANKID" if env.get("PALS_LOCAL_RANKID") else "PMI_LOCAL_RANK"),
            local_size=local_size,
            cross_rank=cross_rank,
            cross_size=cross_size,
            hostname=read.hostname(),
            job="pals/" + read.text("PALS_APID", "ALPS_APP_ID"),
            local_ranks_known=False,
        )
