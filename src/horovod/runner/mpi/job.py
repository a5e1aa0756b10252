"""A job that ``mpirun`` starts as a whole, on this host and on others.

The launcher runs ``mpirun`` and the server where the ranks meet. It sees the ranks' output through ``mpirun`` alone, and knows
of their ends what ``mpirun`` and their own runtime say. The ranks know their places from MPI's variables, and need no MPI
library.
"""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from horovod.control.mesh import own_addresses
from horovod.core import config
from horovod.runner import ssh, whole_job, worker_environment
from horovod.runner.agent.base import HostFacts
from horovod.runner.agent.local import LocalAgent
from horovod.runner.agent.messages import ProcessPlan
from horovod.runner.errors import LaunchError, UsageError
from horovod.runner.job import LOOPBACK, Job
from horovod.runner.loop import Loop
from horovod.runner.machine import usable_cores
from horovod.runner.mpi import command, kinds
from horovod.runner.mpi.command import Launch
from horovod.runner.options import Options
from horovod.runner.outcome import Outcome
from horovod.runner.output import Sink
from horovod.runner.signals import SignalPipe
from horovod.runner.supervisor import Plans, Supervisor
from horovod.runner.whole_job import CHILD, PlainOutput, WholeJobPolicy

_OF_A_RANK = (
    config.RANK,
    config.SIZE,
    config.LOCAL_RANK,
    config.LOCAL_SIZE,
    config.CROSS_RANK,
    config.CROSS_SIZE,
    config.HOSTNAME,
)
"""What a launcher has that is itself a rank of another job. Ranks of this one would take it for their own."""
_CHOSEN_SHELL = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER", "I_MPI_HYDRA_BOOTSTRAP")
"""Variables by which somebody, such as Kubernetes' MPI Operator, has chosen for ``mpirun`` what reaches other hosts."""
_FORWARDABLE = re.compile(r"(?!OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|I_MPI_HYDRA|MPI_LOCAL)[A-Za-z_][A-Za-z0-9_]*")
"""What is left out is a launcher's, which tells its own ranks, or has a name that no option can hold."""
_LAST_VARIABLE = "HYDRA_LAST_VARIABLE"
"""Hydra of MPICH 5.0 does not forward the last variable of its environment, so the last is one that nobody needs."""


class MpiJob(Job):
    """See :class:`Job`.

    Raises:
        ValueError: the request cannot be met.
        LaunchError: there is no ``mpirun`` of a known kind.
    """

    def __init__(self, options: Options, environment: Mapping[str, str], *, hosts_python: bool = False) -> None:
        super().__init__(options, environment, hosts_python=hosts_python)
        for name in self._elsewhere:
            if self._hosts[name].user:
                raise UsageError(
                    f"{self._hosts[name].login}: mpirun takes no users; say in ssh's configuration as whom to log in there"
                )
        self._mpi = kinds.find(environment)
        self._launch = self._plan()
        self.command = command.command_line(self._mpi, self._launch)

    def run(
        self,
        stdout: Sink,
        stderr: Sink,
        signals: SignalPipe | None = None,
        published: Mapping[str, bytes] | None = None,
    ) -> Outcome:
        options = self._options
        output = PlainOutput(stdout, stderr, len(self.slots), timestamps=options.prefix_output_with_timestamp)
        self._make_folder()
        with ExitStack() as cleanup:
            server, secret = self._serve(cleanup, published or {})
            mark = f"{config.SECRET_KEY}={secret}".encode()
            guardian = self._start_guardian(cleanup, mark, output)
            self._say_what_has_no_effect(output)
            for notice in command.without_effect(self._mpi, self._launch):
                output.say(f"horovodrun: {notice}")
            loop = Loop()
            cleanup.callback(loop.close)
            supervisor = Supervisor(
                loop,
                output,
                WholeJobPolicy(reads_input=self._reader is not None),
                places={},
                reported_failure=self._reported_failure,
                departed=lambda *_: None,
                signals=signals,
                reader=None if self._reader is None else CHILD,
            )
            facts = HostFacts(sys.executable, usable_cores(), (), None)
            agent = LocalAgent(
                [kinds.PROGRAM], loop, supervisor.report, facts, mark=mark, guardian=guardian, inherits_input=True
            )
            variables = self._variables(self._meeting(self._addresses(), server.address[1], secret))
            variables |= {**command.variables(self._mpi, self._launch), _LAST_VARIABLE: ""}
            if options.verbose:
                output.say(self._describe(variables))
            plans: list[Plans] = [(variables, [ProcessPlan(CHILD, tuple(self.command), {}, self._reader is not None)])]
            found = supervisor.run([agent], lambda: plans, self._seconds)
            return whole_job.outcome(found, kinds.PROGRAM, self._reported_failure())

    def _plan(self) -> Launch:
        options = self._options
        ranks = Counter(slot.hostname for slot in self.slots)
        names = self._variables(self._meeting("", 0, ""))
        folder = options.output_filename
        return Launch(
            command=options.command,
            hosts=tuple(ranks.items()),
            elsewhere=bool(self._elsewhere),
            variables=tuple(sorted(name for name in names if self._travels(name))),
            shell=self._shell() if self._elsewhere else (),
            interfaces=options.nics,
            output="" if folder is None else str(Path(folder).absolute()),
            binding=options.binding_args,
            more=options.mpi_args,
            tcp=options.tcp_flag,
            reader=self._reader,
        )  # fmt: skip

    def _shell(self) -> tuple[str, ...]:
        """What reaches other hosts, and asks no questions. Nothing where somebody has chosen already."""
        options, environment = self._options, self._launcher_environment
        asked = (
            options.ssh_port is not None or options.ssh_identity_file is not None or environment.get(config.SSH_COMMAND)
        )
        if not asked and any(environment.get(name) for name in _CHOSEN_SHELL):
            return ()
        way = ssh.options(environment, options.ssh_port, options.ssh_identity_file, self._seconds)
        return tuple(ssh.words(way))

    @staticmethod
    def _travels(name: str) -> bool:
        if name == config.SECRET_KEY:
            return True
        return bool(worker_environment.forwarded({name: ""})) and _FORWARDABLE.fullmatch(name) is not None

    def _variables(self, meeting: Mapping[str, str]) -> dict[str, str]:
        """The environment of ``mpirun``, and of the ranks on this host."""
        own = {name: value for name, value in self._launcher_environment.items() if name not in _OF_A_RANK}
        return {**own, **self._asked, **self._threads(), **self._memory, **meeting}

    @staticmethod
    def _meeting(addresses: str, port: int, secret: str) -> dict[str, str]:
        found = worker_environment.rendezvous_point((addresses, port), secret)
        del found["PYTHONUNBUFFERED"]  # mpirun labels whatever arrives at once, be it a part of a line
        return found

    def _addresses(self) -> str:
        """Where ranks reach this host: at any of these."""
        if not self._elsewhere:
            return LOOPBACK
        present = [name for _, name in socket.if_nameindex() if name in self._options.nics]
        if self._options.nics and not present:
            raise LaunchError(f"this host has none of the network interfaces {', '.join(self._options.nics)}")
        try:
            return ",".join(own_addresses(",".join(present)) or (LOOPBACK,))
        except ValueError as error:
            raise LaunchError(f"this host cannot be reached by the others: {error}") from None

    def _threads(self) -> dict[str, str]:
        """A fair share of this host's cores, for all hosts; none where this one, which is all we know, takes no part."""
        if not self._here:
            return {}
        most = max(Counter(slot.hostname for slot in self.slots).values())
        return worker_environment.threads(self._launcher_environment, usable_cores(), most)

    def _make_folder(self) -> None:
        if self._launch.output:
            try:
                Path(self._launch.output).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cannot write output to {self._launch.output}: {error.strerror}") from None

    def _describe(self, variables: Mapping[str, str]) -> str:
        words = [f"horovodrun: {len(self.slots)} ranks by {self._mpi.kind.value}: {shlex.join(self.command)}"]
        words.append(f"  they meet at {variables[config.RENDEZVOUS_ADDRESS]}:{variables[config.RENDEZVOUS_PORT]}")
        changed = {**self._asked, **self._threads(), **self._memory}
        words += [f"  {name}={value}" for name, value in sorted(changed.items())]
        return "\n".join(words)
