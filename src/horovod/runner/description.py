"""The description of a job that ``--verbose`` prints before its ranks start. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horovod.runner import worker_environment
from horovod.runner.agent.base import Agent
from horovod.runner.hosts.slots import SlotInfo


def describe(
    command: Sequence[str],
    slots: Sequence[SlotInfo],
    agents: Sequence[Agent],
    rendezvous: Sequence[tuple[str, int]],
    environment: Mapping[str, str],
    *,
    asked: Mapping[str, str],
    memory: Mapping[str, str],
    reader: int | None,
) -> str:
    """The job as text.

    Args:
        command: what each rank runs.
        slots: the assignments, by rank.
        agents: one for each host, all ready.
        rendezvous: where the ranks of each host reach the rendezvous server.
        environment: the launcher's environment.
        asked, memory: variables that the user's flags set for the ranks, and variables for the memory allocator.
        reader: the rank that reads standard input, or None.
    """
    lines = [f"horovodrun: {len(slots)} ranks of: {' '.join(command)}"]
    lines += [f"  rank {slot.rank}: {slot.hostname}, local rank {slot.local_rank}" for slot in slots]
    lines += [f"  rendezvous server at {host}:{port}" for host, port in dict.fromkeys(rendezvous)]
    if reader is not None:
        lines.append(f"  rank {reader} reads standard input")
    lines += [f"  {name}={value}" for name, value in sorted(asked.items())]
    for agent in agents:
        assert agent.facts is not None
        where = f" on {agent.name}" if len(agents) > 1 else ""
        if where:
            lines.append(f"  {agent.facts.python}{where}")
        number = sum(slot.hostname in agent.hosts for slot in slots)
        threads = worker_environment.threads(environment, agent.facts.cores, number)
        if threads:
            share = ", ".join(f"{name}={value}" for name, value in threads.items())
            lines.append(
                f"  {share}: a fair share of {agent.facts.cores} cores{where}; set one of them to choose yourself"
            )
        else:
            lines.append("  threads of OpenMP and MKL: as you have set them")
    if memory:
        limits = ", ".join(f"{name}={value}" for name, value in memory.items())
        lines.append(f"  {limits}: memory of one step is kept for the next; set one of them to choose yourself")
    return "\n".join(lines)
