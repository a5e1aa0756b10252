"""Ranks with the four variables of ``torch.distributed``, but without torchrun: a Kubeflow PyTorchJob, or set by hand."""

from __future__ import annotations

from collections.abc import Mapping

from horovod._base.process_identity import ProcessIdentity, Rank0
from horovod.environments.base import Environment, EnvironmentVariables

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchDistributed(Environment):
    name = "a PyTorchJob, or another launcher for torch.distributed"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        # RANK and WORLD_SIZE alone are set by many tools, often for hosts and not for processes.
        return all(env.get(name, "").strip() for name in VARIABLES)

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = EnvironmentVariables(
            env,
            TorchDistributed.name,
            "every rank needs its own RANK, and the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT; to run the script alone, "
            "unset all four.",
        )
        rank, size = read.number("RANK"), read.number("WORLD_SIZE")
        per_pod = read.text("PET_NPROC_PER_NODE")
        if per_pod.isdecimal() and int(per_pod) > 1 and not read.text("LOCAL_RANK"):
            raise read.error(
                f"environment variable PET_NPROC_PER_NODE={per_pod!r} asks for {per_pod} ranks in each pod, and only torchrun "
                "starts them: run `torchrun` instead of `python` in the pods' command"
            )
        rank_0 = Rank0(read.text("MASTER_ADDR"), read.port("MASTER_PORT"))
        return read.without_local_ranks(rank=rank, size=size, hostname=read.hostname(), rank_0=rank_0)
