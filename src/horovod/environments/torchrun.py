"""Ranks started by ``torchrun`` (``python -m torch.distributed.run``)."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.environments.base import Environment, Identity, Variables


class TorchRun(Environment):
    name = "torchrun"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        # RANK and WORLD_SIZE alone are set by many tools, often for hosts and not for processes.
        return "TORCHELASTIC_RUN_ID" in env and "RANK" in env and "WORLD_SIZE" in env

    @staticmethod
    def identity(env: Mapping[str, str]) -> Identity:
        read = Variables(
            env,
            TorchRun.name,
            "start the script with `torchrun --nproc-per-node N ...` and leave its variables as they are.",
        )
        # A restarted worker group keeps run id, address and often the port; only the restart count tells it apart.
        parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        return read.identity(
            rank=read.number("RANK"),
            size=read.number("WORLD_SIZE"),
            local_rank=read.number("LOCAL_RANK"),
            local_size=read.number("LOCAL_WORLD_SIZE"),
            cross_rank=read.number("GROUP_RANK", 0),
            cross_size=read.number("GROUP_WORLD_SIZE", 1),
            hostname=read.hostname(),
            job="torchrun/" + "/".join(read.text(part) for part in parts),
        )
