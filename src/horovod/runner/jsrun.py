"""A job that ``jsrun`` starts as a whole, inside an LSF job: one child of this launcher, which starts all ranks.

The launcher runs ``jsrun`` and the server where the ranks meet. A file for ``jsrun`` says which rank runs where; the ranks know
their places from its variables. The job's secret is in the environment of ``jsrun``, which hands it on. No LSF was there to try
this on: the tests run a program in the place of ``jsrun``.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil

from horovod.control.mesh import own_addresses
from horovod.core import config
from horovod.environments.lsf_hosts import lsf_hosts
from horovod.runner import worker_environment
from horovod.runner.agent.base import HostFacts
from horovod.runner.agent.local import LocalAgent
from horovod.runner.agent.messages import Exit, ProcessPlan
from horovod.runner.errors import LaunchError, UsageError
from horovod.runner.hosts import SlotInfo
from horovod.runner.job import LOOPBACK, Job
from horovod.runner.loop import Loop
from horovod.runner.machine import usable_cores
from horovod.runner.notices import without_effect
from horovod.runner.options import Options
from horovod.runner.outcome import Failure, Outcome
from horovod.runner.output import Output, RankStream, Sink
from horovod.runner.policy import Decision, StaticPolicy
from horovod.runner.signals import SignalPipe
from horovod.runner.standard_input import NOBODY
from horovod.runner.supervisor import Plans, Supervisor

PROGRAM = "jsrun"
_CHILD = 0
"""The number of the one process."""
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


def is_wanted(options: Options, environment: Mapping[str, str]) -> bool:
    """Whether jsrun is to start the ranks: the user says so, or has said nothing in an LSF job that has a jsrun."""
    if options.use_jsrun:
        return True
    said = options.use_gloo or options.use_mpi or options.hosts is not None or options.hostfile is not None
    in_lsf = bool(environment.get("LSB_JOBID"))
    return in_lsf and not said and shutil.which(PROGRAM, path=environment.get("PATH")) is not None


def rank_file(slots: Sequence[SlotInfo], cpus: Mapping[str, int], threads: int) -> str:
    """The explicit resource file for jsrun: each rank, its host, and its equal share of the host's CPUs.

    Args:
        cpus: cores that LSF has given to the job on each host.
        threads: hardware threads of a core; jsrun numbers those.
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
    """What starts the ranks: where they run comes from ``file``, or from the user's ``--binding-args``."""
    words = [PROGRAM]
    words += ["--erf_input", file] if options.binding_args is None else shlex.split(options.binding_args)
    if options.output_filename is not None:
        words += ["--stdio_stderr", options.output_filename, "--stdio_stdout", options.output_filename]
    smpi = [*(["-tcp"] if options.tcp_flag else []), *([options.mpi_args] if options.mpi_args else [])]
    if smpi:
        words += ["--smpiargs", " ".join(smpi)]
    return [*words, *options.command]


class JsrunJob(Job):
    """A checked request. See :class:`Job`."""

    def __init__(self, options: Options, environment: Mapping[str, str], *, hosts_python: bool = False) -> None:
        if not environment.get("LSB_JOBID"):
            raise UsageError(
                "Horovod did not detect an LSF job. --jsrun works inside of one only: submit the command with bsub, or leave "
                "out --jsrun"
            )
        if shutil.which(PROGRAM, path=environment.get("PATH")) is None:
            raise UsageError("there is no jsrun on the PATH. Leave out --jsrun: --gloo starts the ranks over ssh")
        if options.stdin not in (None, NOBODY):
            raise UsageError(
                "--stdin is not supported with --jsrun: leave it out, or start the ranks over ssh with --gloo"
            )
        super().__init__(
            replace(options, use_jsrun=False, mpi_args=None, binding_args=None), environment, hosts_python=hosts_python
        )
        self._options = options

    def run(
        self,
        stdout: Sink,
        stderr: Sink,
        signals: SignalPipe | None = None,
        published: Mapping[str, bytes] | None = None,
    ) -> Outcome:
        options = self._options
        output = _PlainOutput(stdout, stderr, len(self.slots), timestamps=options.prefix_output_with_timestamp)
        with ExitStack() as cleanup:
            server, secret = self._serve(cleanup, published or {})
            mark = f"{config.SECRET_KEY}={secret}".encode()
            guardian = self._start_guardian(cleanup, mark, output)
            for notice in without_effect(options, several_hosts=True):
                output.say(f"horovodrun: {notice}")
            file = cleanup.enter_context(tempfile.NamedTemporaryFile("w", prefix="horovod-", suffix=".erf"))
            file.write(rank_file(self.slots, self._cpus(), _threads_of_a_core()))
            file.flush()
            command = command_line(options, file.name)
            variables = self._variables(server.address[1], secret)
            if options.verbose:
                output.say(
                    f"horovodrun: {len(self.slots)} ranks by {shlex.join(command)}\n{Path(file.name).read_text()}"
                )
            loop = Loop()
            cleanup.callback(loop.close)
            supervisor = Supervisor(
                loop,
                output,
                _Policy([_CHILD], None),
                places={},
                reported_failure=self._reported_failure,
                departed=lambda *_: None,
                signals=signals,
            )
            facts = HostFacts(sys.executable, usable_cores(), (), None)
            agent = LocalAgent(
                [PROGRAM], loop, supervisor.report, facts, mark=mark, guardian=guardian, inherits_input=True
            )
            plans: list[Plans] = [(variables, [ProcessPlan(_CHILD, tuple(command), {})])]
            found = supervisor.run([agent], lambda: plans, self._seconds)
            return _outcome(found, self._reported_failure())

    def _cpus(self) -> dict[str, int]:
        given = lsf_hosts(self._launcher_environment) or {}
        return {slot.hostname: given.get(slot.hostname, slot.local_size) for slot in self.slots}

    def _variables(self, port: int, secret: str) -> dict[str, str]:
        """The environment of jsrun, which hands it on to the ranks."""
        own = {name: value for name, value in self._launcher_environment.items() if name not in _OF_A_RANK}
        addresses = LOOPBACK
        if self._elsewhere:
            here = {name for _, name in socket.if_nameindex()}
            try:
                addresses = ",".join(
                    own_addresses(",".join(nic for nic in self._options.nics if nic in here)) or (LOOPBACK,)
                )
            except ValueError as error:
                raise LaunchError(f"this host cannot be reached by the others: {error}") from None
        most = max(Counter(slot.hostname for slot in self.slots).values())
        cores = max(self._cpus().values())
        return {
            **own,
            **self._asked,
            **worker_environment.threads(self._launcher_environment, cores, most),
            **self._memory,
            **worker_environment.rendezvous_point((addresses, port), secret),
        }


class _Policy(StaticPolicy):
    """Ends with its only process, which sees itself to it that all ranks end when one has failed."""

    def _lead(self, reported: Failure | None, wait_for_it: bool) -> list[Decision]:
        return [] if self._first_failed is None else self._end_all()


class _PlainOutput(Output):
    """Shows the child's lines without a label of ours, since they are of many ranks."""

    def stream(self, rank: int, name: str) -> RankStream:
        return RankStream("", [self._console[name]], timestamps=self._timestamps)


def _outcome(found: Outcome, reported: Failure | None) -> Outcome:
    """What the supervisor of jsrun has found, as the end of the whole job."""
    end = found.exits.get(_CHILD, Exit(255))
    if found.interrupted or not end.code:
        return replace(found, culprit=None, exit=end)
    rank, reason = (0, "") if reported is None else (reported.rank, reported.reason)
    return _JsrunFailed(found.exits, rank, end, reason=reason, immortal=found.immortal)


class _JsrunFailed(Outcome):
    """A job that jsrun has ended. The culprit is known only where the runtime of a rank has given a reason."""

    def describe(self) -> str:
        lines = [f"horovodrun: the job failed: {PROGRAM} ended with exit code {self.exit}."]
        if self.reason:
            lines.append(f"Rank {self.culprit} failed first. Reason: {self.reason}")
        return "\n".join(lines)


def _threads_of_a_core() -> int:
    """Of this host, for all of them."""
    return max(1, (psutil.cpu_count() or 1) // (psutil.cpu_count(logical=False) or psutil.cpu_count() or 1))
