"""Pods of Kubeflow Trainer v2 whose command is not torchrun: each pod is one rank. The variables are those for torchrun."""

from __future__ import annotations

from collections.abc import Mapping

from horovod._base.process_identity import ProcessIdentity, Rank0
from horovod.environments.base import Environment, EnvironmentVariables, Number


class KubeflowTrainer(Environment):
    name = "Kubeflow Trainer"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        return bool(env.get("PET_NNODES", "").strip())

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = EnvironmentVariables(
            env,
            KubeflowTrainer.name,
            "run `torchrun` instead of `python` in the pods' command, or set numProcPerNode to 1 for one rank per pod.",
        )
        nodes, ranks = read.text("PET_NNODES"), read.text("PET_NPROC_PER_NODE") or "1"
        least, _, most = nodes.partition(":")
        if not least.isdecimal() or (most and least != most):
            raise read.error(f"environment variable PET_NNODES={nodes!r} is not the number of nodes")
        size = Number(int(least), f"PET_NNODES={nodes!r}")
        alone = size.value == 1
        if ranks != "1" and (
            ranks.isdecimal() or not alone
        ):  # "auto" and the like: alone, this may well be the only rank
            raise read.error(
                f"environment variable PET_NPROC_PER_NODE={ranks!r} asks for several ranks in each pod, and only torchrun "
                "starts them"
            )
        if alone:
            return read.without_local_ranks(rank=read.number("PET_NODE_RANK", 0), size=size, hostname=read.hostname())
        address = read.text("PET_MASTER_ADDR")
        if not address:
            raise read.error("environment variable PET_MASTER_ADDR is missing, so the ranks cannot find rank 0")
        rank_0 = Rank0(address, read.port("PET_MASTER_PORT"))
        return read.without_local_ranks(
            rank=read.number("PET_NODE_RANK"), size=size, hostname=read.hostname(), rank_0=rank_0
        )
