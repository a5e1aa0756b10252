"""Ranks started by ``torchrun`` (``python -m torch.distributed.run``)."""

from __future__ import annotations

from collections.abc import Mapping

from horovod._base.process_identity import ProcessIdentity, Rank0
from horovod.environments.base import Environment, EnvironmentVariables


class TorchRun(Environment):
    name = "torchrun"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        # RANK and WORLD_SIZE alone are set by many tools, often for hosts and not for processes.
        return "TORCHELASTIC_RUN_ID" in env and "RANK" in env and "WORLD_SIZE" in env

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = EnvironmentVariables(
            env,
            TorchRun.name,
            "start the script with `torchrun --nproc-per-node N ...` and leave its variables as they are.",
        )
        # A restarted worker group keeps run id, address and often the port; only the restart count differs. On several
        # hosts the restart count does not help, because each agent counts its own restarts.
        parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        size, local_size = read.number("WORLD_SIZE"), read.number("LOCAL_WORLD_SIZE")
        several = local_size.value < size.value
        group = read.number("GROUP_RANK", 0)
        return read.identity(
            rank=read.number("RANK"),
            size=size,
            local_rank=read.number("LOCAL_RANK"),
            local_size=local_size,
            cross_rank=group,
            cross_size=read.number("GROUP_WORLD_SIZE", 1),
            hostname=read.hostname(),
            job="torchrun/" + "/".join(read.text(part) for part in parts),
            local_ranks_known=not several,  # an agent knows how many ranks it starts, but not how many others start
            node=f"torchrun's node {group.value}",
            rank_0=_rank_0(read) if several else None,
        )


def _rank_0(read: EnvironmentVariables) -> Rank0:
    address = read.text("MASTER_ADDR")
    if not address:
        raise read.error(
            "environment variable MASTER_ADDR is missing, so the ranks of several hosts cannot find rank 0"
        )
    # The agent's store listens at that port only if this variable is set; otherwise rank 0 itself listens there.
    shared = read.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Rank0(address, read.port("MASTER_PORT"), read.text("TORCHELASTIC_RUN_ID") if shared else "")
