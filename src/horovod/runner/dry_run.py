"""The output of ``horovodrun --dry-run``: the processes that would start on each host, as text to read and to copy. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovod._base import config
from horovod.runner.agent.messages import ProcessPlan

PORT, FREE, SECRET, ADDRESS, CORES = "PORT", "FREE_PORT", "SECRET", "ADDRESS", "CORES"
"""Placeholders for values that are known only when the job starts, or that are never shown."""
_NOTES = {
    PORT: "the port of the rendezvous server, which the kernel chooses when the job starts",
    FREE: "a free port of rank 0's host, for torch.distributed; chosen when the job starts",
    SECRET: "made for each job, and never shown",
    ADDRESS: "the address of this host at which the other host reaches it",
    CORES: "the number of the host's cores, which its agent counts, divided by the number of its ranks",
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
    """The command that starts an agent on the host; empty on the launcher's host."""


def describe(parts: Sequence[HostPart], addresses: Sequence[str], job: Sequence[str] = ()) -> str:
    """The job as text.

    Args:
        parts: one for each host.
        addresses: the addresses at which agents would try to reach the launcher.
        job: lines about the whole job.
    """
    lines = ["horovodrun: this is the job that would run; nothing is started, and no host is contacted.", *job]
    for part in parts:
        ranks = _ranks([plan.number for plan in part.plans])
        lines += ["", f"{ranks} on {', '.join(part.names)}, in {part.directory}"]
        if part.agent:
            tried = ", ".join(addresses) or "none that is known"
            lines += [
                "  An agent runs them. The command that starts it:",
                f"    {shlex.join(part.agent)}",
                "  The command must work without a password. The host takes part if it has the same version of Horovod, and if",
                f"  its agent can enter that folder and reaches the launcher at one of {tried}.",
                "  They have the environment of a login there, these variables from here",
                f"    {' '.join(sorted(part.inherited))}",
                "  and",
            ]
        else:
            lines.append("  This is the launcher's host, so they inherit its environment. In addition they have")
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
