"""Ranks started by ``jsrun``, the launcher of LSF on IBM's systems.

The variables are those of the documentation of IBM's Job Step Manager. This has not been tested on a real system.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod._base.process_identity import HostList, ProcessIdentity
from horovod.environments.base import Environment, EnvironmentVariables, consecutive
from horovod.environments.lsf_hosts import lsf_hosts


class JSRun(Environment):
    name = "jsrun"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        return "JSM_NAMESPACE_RANK" in env

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = _variables(env)
        rank = read.number("JSM_NAMESPACE_RANK")
        size = read.number(_first(env, "JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE"))
        local_size = read.number(_first(env, "JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
        cross_rank, cross_size = consecutive(rank, size, local_size)
        parts = (read.text("LSB_JOBID"), read.text("PMIX_NAMESPACE", "JSM_NAMESPACE_ID"))
        return read.identity(
            rank=rank,
            size=size,
            local_rank=read.number(_first(env, "JSM_NAMESPACE_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")),
            local_size=local_size,
            cross_rank=cross_rank,
            cross_size=cross_size,
            hostname=read.hostname("PMIX_HOSTNAME"),
            job="jsrun/" + "/".join(parts),
            local_ranks_known=False,
        )

    @staticmethod
    def host_list(env: Mapping[str, str]) -> HostList | None:
        try:
            hosts = lsf_hosts(env)
        except ValueError as error:
            raise _variables(env).error(str(error)) from None
        return None if hosts is None else HostList(tuple(hosts), "", ())


def _variables(env: Mapping[str, str]) -> EnvironmentVariables:
    return EnvironmentVariables(
        env,
        JSRun.name,
        "start the script with `horovodrun --jsrun -np N python ...` and leave its variables as they are.",
    )


def _first(env: Mapping[str, str], *names: str) -> str:
    """The first of the variables that is set; if none is, the first one."""
    return next((name for name in names if env.get(name)), names[0])
