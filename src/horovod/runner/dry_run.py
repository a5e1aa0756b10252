"""The output of ``horovodrun --dry-run``: the processes that would be started on each host, as text to read and to copy.
Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovod.core import config
from horovod.runner.agent.messages import ProcessPlan

PORT, FREE, SECRET, ADDRESS, CORES = "PORT", "FREE_PORT", "SECRET", "ADDRESS", "CORES"
"""Placeholders for values that are known only when the job starts, or that are never shown."""
_NOTES = {
    PORT: "the launcher's, which the kernel chooses when the job starts",
    FREE: "one of rank 0's host, for torch.distributed; chosen when the job starts",
    SECRET: "made for each job, and never shown",
    ADDRESS: "the one of this host's addresses at which the other host reaches it",
    CORES: "the host's cores, which its agent counts, divided by its ranks",
}


class HostPart(NamedTuple):
    """One host's share of a job."""

    names: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    """The variables that all its ranks have."""
    inherited: Mapping[str, str]
    """The part of these that comes from the launcher's environment."""
    plans: Sequence[ProcessPlan]
    agent: Sequence[str] = ()
    """The command that starts an agent on the host; empty on the launcher's own."""


def describe(parts: Sequence[HostPart], addresses: Sequence[str], job: Sequence[str] = ()) -> str:
    """The job as text.

    Args:
        addresses: of the launcher's host, at which agents would try to reach it.
        job: lines about the whole of it.
    """
    lines = ["horovodrun: this is what the job would be; nothing is started, and no host is asked.", *job]
    for part in parts:
        ranks = _ranks([plan.number for plan in part.plans])
        lines += ["", f"{ranks} on {', '.join(part.names)}, in {part.directory}"]
        if part.agent:
            tried = ", ".join(addresses) or "none that is known"
            lines += [
                "  An agent runs them, which is started by",
                f"    {shlex.join(part.agent)}",
                "  It takes part if it can be started so without a password, has the same version of Horovod, can enter that",
                f"  folder, and reaches the launcher at one of {tried}.",
                "  The environment of a login there, and from here",
                f"    {' '.join(sorted(part.inherited))}",
                "  and",
            ]
        else:
            lines.append("  This is the launcher's own host, so they inherit its environment; and they have")
        own = {name: value for name, value in part.environment.items() if part.inherited.get(name) != value}
        lines += [f"    {name}={shlex.quote(value)}" for name, value in sorted(own.items())]
        for plan in part.plans:
            who = " ".join(f"{name}={shlex.quote(value)}" for name, value in plan.environment.items())
            lines += [
                f"  rank {plan.number}{', which reads standard input' if plan.reads_input else ''}",
                f"    env {who} {shlex.join(plan.command)}",
            ]
    text = "\n".join(lines)
    notes = [f"  {value}: {note}" for value, note in _NOTES.items() if f"={value}\n" in text + "\n"]
    return "\n".join([text, "", *notes])


def hide(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with ``PORT``, ``FREE_PORT`` and ``SECRET`` in place of values, and without this process's own folder."""
    hidden = {**environment, config.RENDEZVOUS_PORT: PORT, config.SECRET_KEY: SECRET}
    hidden.pop(config.FLIGHT_RECORDER_DIR, None)
    return {name: FREE if name == "MASTER_PORT" else value for name, value in hidden.items()}


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return f"Ranks {numbers[0]} {'and' if len(numbers) == 2 else 'to'} {numbers[-1]}"
