"""Starts an agent on each host of a job other than the launcher's: all at the same time, without waiting for any.

srun reaches nodes of the Slurm allocation that the launcher runs in; ssh reaches other hosts. The connection itself checks
whether a host can take part; nothing is cached from job to job.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from horovod.control.mesh import own_addresses
from horovod.runner.agent.base import Agent, Report
from horovod.runner.agent.messages import Prepare
from horovod.runner.errors import LaunchError
from horovod.runner.event_loop import Loop
from horovod.runner.hosts import mpi_operator
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.hosts.slurm_allocation import allocation
from horovod.runner.open_files import HOST, make_room
from horovod.runner.options import Options
from horovod.runner.reach import srun, ssh
from horovod.runner.reach.child_connection import ChildConnection
from horovod.runner.reach.remote import RemoteAgent


def reach(
    hosts: Sequence[HostInfo],
    options: Options,
    environment: Mapping[str, str],
    *,
    loop: Loop,
    report: Report,
    secret: str,
    port: int,
    seconds: float,
) -> list[Agent]:
    """Agents on ``hosts``. Later each agent either gets its facts, or is closed, and its ``trouble`` says why.

    Args:
        environment: the launcher's environment.
        secret: the job's secret, encoded.
        port: the port of the rendezvous server, which listens at all addresses of this host.
        seconds: how long an agent may take to get ready.

    Raises:
        ValueError: the program that reaches other hosts cannot be run.
        LaunchError: this host has none of the network interfaces that the job may use, or may not open so many files.
    """
    make_room(HOST * len(hosts), f"the launcher for {len(hosts)} other hosts")
    addresses = [(address, port) for address in launcher_addresses(options)]
    begin = Prepare(secret, working_directory(environment), addresses, seconds / 2)
    name = "ssh" if mpi_operator.kubexec(environment) is None else "kubexec"
    agents: list[Agent] = []
    try:
        for host, command in zip(hosts, command_lines(hosts, options, environment, seconds), strict=True):
            connection: ChildConnection
            if command.through_slurm:
                connection = srun.Srun(command.arguments, srun.environment(environment))
            else:
                connection = ssh.Ssh(command.arguments, name)
            agents.append(RemoteAgent(host.hostname, loop, report, connection, begin))
    except BaseException:
        for agent in agents:
            agent.kill()
        raise
    return agents


class AgentCommand(NamedTuple):
    """The command that starts an agent on one host."""

    arguments: list[str]
    through_slurm: bool


def command_lines(
    hosts: Sequence[HostInfo], options: Options, environment: Mapping[str, str], seconds: float
) -> list[AgentCommand]:
    """The command that starts an agent on each of ``hosts``. Runs nothing.

    It runs ``kubexec`` in the launcher pod of an MPIJob, ``srun`` for nodes of the Slurm allocation, and ``ssh`` otherwise.

    Raises:
        ValueError: the environment's settings of ssh do not parse.
    """
    script = mpi_operator.kubexec(environment)
    if script is not None:
        agent = ssh.agent_command(sys.executable, environment)
        return [AgentCommand(mpi_operator.command_line(script, host.hostname, agent), False) for host in hosts]
    allocated = allocation(environment)
    cpus = {} if allocated is None else dict(zip(allocated.nodes, allocated.cpus, strict=True))
    way = ssh.options(environment, options.ssh_port, options.ssh_identity_file, seconds)
    commands = []
    for host in hosts:
        if host.hostname in cpus and not host.user:
            arguments = srun.command_line(host.hostname, cpus[host.hostname], sys.executable)
            commands.append(AgentCommand(arguments, True))
        else:
            commands.append(AgentCommand(ssh.command_line(way, host.login, sys.executable, environment), False))
    return commands


def launcher_addresses(options: Options) -> tuple[str, ...]:
    """Addresses of this host at which other hosts may reach the launcher.

    Raises:
        LaunchError: this host has none of the network interfaces that the job may use.
    """
    known = [name for _, name in socket.if_nameindex()]
    present = [name for name in known if name in options.nics]
    if options.nics and not present:
        raise LaunchError(
            f"the launcher's host has none of the network interfaces {', '.join(options.nics)}; it has {', '.join(known)}"
        )
    try:
        return own_addresses(",".join(present)) or ("127.0.0.1",)
    except ValueError as error:
        raise LaunchError(f"this host cannot be reached by the others: {error}") from None


def working_directory(environment: Mapping[str, str]) -> str:
    """The folder in which the ranks run: PWD if it names this folder, since other hosts may not have the target of a link."""
    said, found = environment.get("PWD", ""), str(Path.cwd())
    try:
        return said if Path(said).is_absolute() and Path(said).samefile(found) else found
    except OSError:
        return found
