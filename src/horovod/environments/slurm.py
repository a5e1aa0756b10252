"""Ranks started by Slurm's ``srun``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from horovod._base.process_identity import HostList, ProcessIdentity
from horovod.environments.base import Environment, EnvironmentVariables, Number
from horovod.environments.slurm_nodes import expand_nodes, expand_ports

# Slurm numbers batch scripts, interactive shells and other special steps from here on; steps of srun count up from 0.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class Slurm(Environment):
    name = "slurm"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        # A process without its own step is the batch script or its child: a single process, even if SLURM_NTASKS is larger.
        step = env.get("SLURM_STEP_ID", "").strip()
        if not step or "SLURM_PROCID" not in env:
            return False
        return not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        read = _variables(env)
        # The step's own count comes first: a step may use fewer tasks than the job was given.
        size = read.number("SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS")
        local_rank = read.number("SLURM_LOCALID")
        node = read.number("SLURM_NODEID", 0)
        source, layout = _tasks_per_node(env, read, size)
        if node.value >= len(layout):
            raise read.error(f"{node.source} lies outside {source}, which describes {len(layout)} nodes")
        if sum(layout) != size.value:
            raise read.error(f"{source} adds up to {sum(layout)} tasks and contradicts {size.source}")
        peers = [index for index, tasks in enumerate(layout) if tasks > local_rank.value]
        return read.identity(
            rank=read.number("SLURM_PROCID"),
            size=size,
            local_rank=local_rank,
            local_size=Number(layout[node.value], f"{source} on node {node.value}"),
            cross_rank=Number(sum(index < node.value for index in peers), f"cross rank from {source}"),
            cross_size=Number(max(1, len(peers)), f"cross size from {source}"),
            hostname=read.hostname("SLURMD_NODENAME"),
            job="slurm/"
            + "/".join(read.text(part) for part in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
        )

    @staticmethod
    def host_list(env: Mapping[str, str]) -> HostList | None:
        read = _variables(env)
        nodes = read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        ports = read.text("SLURM_STEP_RESV_PORTS")
        if not nodes:
            return None
        try:
            hosts = tuple(expand_nodes(nodes))
            # Task 0 is on the first node with a block or a cyclic distribution, but not necessarily if a file places tasks.
            first = "" if read.text("SLURM_DISTRIBUTION").startswith("arbitrary") else hosts[0]
            return HostList(hosts, first, tuple(expand_ports(ports)) if ports else ())
        except ValueError as error:
            raise read.error(f"the list of nodes {nodes!r} or of reserved ports {ports!r}: {error}") from None


def _variables(env: Mapping[str, str]) -> EnvironmentVariables:
    return EnvironmentVariables(
        env, Slurm.name, "start the script with `srun -n N python ...` and leave its variables as they are."
    )


def _tasks_per_node(env: Mapping[str, str], read: EnvironmentVariables, size: Number) -> tuple[str, list[int]]:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        text = env.get(name, "").strip()
        if text:
            try:
                return f"{name}={text!r}", parse_tasks_per_node(text)
            except ValueError as error:
                raise read.error(f"environment variable {name}={text!r}: {error}") from None
    nodes = read.number("SLURM_JOB_NUM_NODES", 1)
    if nodes.value > 1:
        raise read.error(f"SLURM_STEP_TASKS_PER_NODE is missing, but {nodes.source}")
    return size.source, [size.value]


def parse_tasks_per_node(text: str) -> list[int]:
    """Tasks of each node from Slurm's short form: ``"2(x3),1"`` is ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not of the form 2 or 2(x3)")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts
