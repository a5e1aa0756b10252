"""A job whose ranks ``jsrun`` starts, inside an LSF job.

A file for ``jsrun`` says which rank runs where. The ranks read their numbers from ``jsrun``'s variables. ``jsrun`` passes its
environment on to them, with the job's secret. This has not been tried on a real LSF: the tests run a program instead of
``jsrun``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil

from horovod.environments.lsf_hosts import lsf_hosts
from horovod.runner.errors import UsageError
from horovod.runner.external.base import ExternalJob
from horovod.runner.external.extra_arguments import split_arguments
from horovod.runner.hosts.slots import SlotInfo
from horovod.runner.options import Options
from horovod.runner.output.standard_input import NO_RANK

PROGRAM = "jsrun"


def is_wanted(options: Options, environment: Mapping[str, str]) -> bool:
    """Whether jsrun starts the ranks.

    That is so if the user asks for it; or in an LSF job with a jsrun, if the user names neither another launcher nor hosts.
    """
    if options.use_jsrun:
        return True
    other = options.use_gloo or options.use_mpi or options.hosts is not None or options.hostfile is not None
    in_lsf = bool(environment.get("LSB_JOBID"))
    return in_lsf and not other and shutil.which(PROGRAM, path=environment.get("PATH")) is not None


def rank_file(slots: Sequence[SlotInfo], cpus: Mapping[str, int], threads: int) -> str:
    """The explicit resource file for jsrun: each rank, its host, and its equal share of the host's CPUs.

    Args:
        slots: the assignments, by rank.
        cpus: the number of cores that LSF has given to the job on each host.
        threads: the number of hardware threads of a core; jsrun numbers threads.
    """
    lines = ["overlapping_rs: allow", "cpu_index_using: logical"]
    for slot in slots:
        if slot.local_rank == 0:
            lines.append("")
        each = max(1, cpus[slot.hostname] // slot.local_size) * threads
        first = slot.local_rank * each
        share = f"cpu: {{{first}-{first + each - 1}}} ; gpu: * ; mem: *"
        lines.append(f"rank: {slot.rank}: {{ hostname: {slot.hostname}; {share} }}")
    return "\n".join(lines) + "\n"


def command_line(options: Options, file: str) -> list[str]:
    """The command that starts the ranks. ``file`` says where they run, unless the user gives ``--binding-args``.

    Raises:
        ValueError: ``--binding-args`` cannot be split as a shell would.
    """
    arguments = [PROGRAM]
    given = options.binding_args
    arguments += ["--erf_input", file] if given is None else split_arguments("--binding-args", given)
    if options.output_filename is not None:
        arguments += ["--stdio_stderr", options.output_filename, "--stdio_stdout", options.output_filename]
    smpi = [*(["-tcp"] if options.tcp_flag else []), *([options.mpi_args] if options.mpi_args else [])]
    if smpi:
        arguments += ["--smpiargs", " ".join(smpi)]
    return [*arguments, *options.command]


class JsrunJob(ExternalJob):
    """See :class:`ExternalJob`."""

    program = PROGRAM

    def __init__(self, options: Options, environment: Mapping[str, str], *, hosts_python: bool = False) -> None:
        if not environment.get("LSB_JOBID"):
            raise UsageError(
                "Horovod did not detect an LSF job. --jsrun works inside an LSF job only: submit the command with bsub, or "
                "leave out --jsrun"
            )
        if shutil.which(PROGRAM, path=environment.get("PATH")) is None:
            raise UsageError("there is no jsrun on the PATH. Leave out --jsrun: --gloo starts the ranks over ssh")
        if options.stdin not in (None, NO_RANK):
            raise UsageError(
                "--stdin is not supported with --jsrun: leave it out, or start the ranks over ssh with --gloo"
            )
        command_line(options, "")  # raises for arguments that cannot be split, before anything starts
        super().__init__(replace(options, use_jsrun=True, stdin=NO_RANK), environment, hosts_python=hosts_python)

    def _command_line(self, cleanup: ExitStack) -> list[str]:
        file = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="horovod-")), "ranks.erf")
        file.write_text(self._rank_file())
        return command_line(self._options, str(file))

    def _cores(self) -> int:
        return max(self._cpus().values())

    def _describe(self, command: Sequence[str], variables: Mapping[str, str]) -> str:
        description = super()._describe(command, variables)
        return description if self._options.binding_args is not None else f"{description}\n{self._rank_file()}"

    def _rank_file(self) -> str:
        return rank_file(self.slots, self._cpus(), _threads_of_a_core())

    def _cpus(self) -> dict[str, int]:
        """Cores that LSF has given to the job, by host."""
        given = lsf_hosts(self._launcher_environment) or {}
        return {slot.hostname: given.get(slot.hostname, slot.local_size) for slot in self.slots}


def _threads_of_a_core() -> int:
    """The number of hardware threads of a core of this host; the other hosts are assumed to have as many."""
    return max(1, (psutil.cpu_count() or 1) // (psutil.cpu_count(logical=False) or psutil.cpu_count() or 1))
