"""A job whose ranks ``mpirun`` starts, on this host and on others.

The launcher sees the ranks' output through ``mpirun``. The ranks read their numbers from MPI's variables, and need no MPI
library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from horovod._base import config
from horovod.runner import worker_environment
from horovod.runner.checks import batch_job
from horovod.runner.errors import UsageError
from horovod.runner.external.base import ExternalJob
from horovod.runner.external.mpi import command, kinds
from horovod.runner.external.mpi.command import Launch
from horovod.runner.machine import usable_cores
from horovod.runner.options import Options
from horovod.runner.reach import ssh
from horovod.runner.reach.check import unreachable

_CHOSEN_SHELL = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER", "I_MPI_HYDRA_BOOTSTRAP")
"""Variables that say how ``mpirun`` reaches other hosts. The user, or Kubernetes' MPI Operator, may have set one."""
_FORWARDABLE = re.compile(r"(?!OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|I_MPI_HYDRA|MPI_LOCAL)[A-Za-z_][A-Za-z0-9_]*")
"""Variables that ``mpirun`` can pass to other hosts. MPI's own variables are excluded: ``mpirun`` sets them for its ranks."""
_CHECK_SECONDS = 15.0
"""How long the check for unreachable hosts after a failure may take: longer than ssh takes to give one up."""
_LAST_VARIABLE = "HYDRA_LAST_VARIABLE"
"""Hydra of MPICH 5.0 does not forward the last variable of its environment, so an unused one is added as the last."""


class MpiJob(ExternalJob):
    """See :class:`ExternalJob`.

    Raises:
        ValueError: the request cannot be met.
        LaunchError: there is no ``mpirun`` of a known kind.
    """

    program = kinds.PROGRAM

    def __init__(self, options: Options, environment: Mapping[str, str], *, hosts_python: bool = False) -> None:
        super().__init__(options, environment, hosts_python=hosts_python)
        for name in self._elsewhere:
            if self._hosts[name].user:
                raise UsageError(
                    f"{self._hosts[name].login}: mpirun accepts no user names; set the user for that host in ssh's "
                    f"configuration"
                )
        self._mpi = kinds.find(environment)
        self._launch = self._plan()
        self.command = command.command_line(self._mpi, self._launch)

    def _command_line(self, cleanup: ExitStack) -> list[str]:
        if self._launch.output and not self._options.dry_run:
            try:
                Path(self._launch.output).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cannot write output to {self._launch.output}: {error.strerror}") from None
        return self.command

    def _cores(self) -> int | None:
        # The other hosts are assumed to be like this one, if this one is among the job's hosts.
        return usable_cores() if self._here else None

    def _variables(self, rendezvous: Mapping[str, str]) -> dict[str, str]:
        return {**self._of_ranks(rendezvous), **command.variables(self._mpi, self._launch), _LAST_VARIABLE: ""}

    def _of_ranks(self, rendezvous: Mapping[str, str]) -> dict[str, str]:
        """The variables of the ranks. PYTHONUNBUFFERED is left out: ``mpirun`` labels each piece that arrives, even a part of a
        line."""
        return super()._variables({name: value for name, value in rendezvous.items() if name != "PYTHONUNBUFFERED"})

    def _unreachable(self) -> dict[str, str]:
        # mpirun may lose the messages of ssh, and that of MPICH names no host. In an allocation of Slurm, mpirun uses srun.
        if not self._launch.shell or batch_job(self._launcher_environment):
            return {}
        return unreachable(self._launch.shell, self._elsewhere, _CHECK_SECONDS)

    def _notices(self) -> list[str]:
        return [*super()._notices(), *command.without_effect(self._mpi, self._launch)]

    def _title(self) -> str:
        return self._mpi.kind.value

    def _plan(self) -> Launch:
        options = self._options
        ranks = Counter(slot.hostname for slot in self.slots)
        names = self._of_ranks(worker_environment.rendezvous_point(("", 0), ""))
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
        """The command by which ``mpirun`` reaches other hosts without asking questions. Empty: ``mpirun`` chooses."""
        options, environment = self._options, self._launcher_environment
        asked = (
            options.ssh_port is not None or options.ssh_identity_file is not None or environment.get(config.SSH_COMMAND)
        )
        if not asked and any(environment.get(name) for name in _CHOSEN_SHELL):
            return ()
        way = ssh.options(environment, options.ssh_port, options.ssh_identity_file, self._seconds)
        return tuple(ssh.ssh_arguments(way))

    @staticmethod
    def _travels(name: str) -> bool:
        """Whether ranks on other hosts get the variable."""
        if name == config.SECRET_KEY:
            return True
        return bool(worker_environment.forwarded({name: ""})) and _FORWARDABLE.fullmatch(name) is not None
