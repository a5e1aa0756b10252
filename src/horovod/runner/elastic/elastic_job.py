"""An elastic job from the user's request to its outcome."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from horovod._base import config
from horovod.control.listener import LARGEST_QUEUE
from horovod.runner.agent.base import Agent, HostFacts, Report
from horovod.runner.agent.local_agent import LocalAgent
from horovod.runner.agent.messages import ProcessPlan
from horovod.runner.checks import batch_job
from horovod.runner.children import Cleanup, owned
from horovod.runner.elastic.blacklist import Blacklist
from horovod.runner.elastic.decisions import StartProcess
from horovod.runner.elastic.discovery import PERIOD_SECONDS, Discovery
from horovod.runner.elastic.elastic_policy import HUNG_SECONDS, ElasticPolicy
from horovod.runner.elastic.job_state import JobState, Limits
from horovod.runner.elastic.supervisor import ElasticSupervisor
from horovod.runner.errors import UsageError
from horovod.runner.event_loop import Loop
from horovod.runner.hosts import host_sources
from horovod.runner.hosts.slots import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.job import LOOPBACK, Job
from horovod.runner.machine import usable_cores
from horovod.runner.options import Options
from horovod.runner.output.outcome import Outcome
from horovod.runner.output.output import JobOutput, Sink
from horovod.runner.output.standard_input import NO_RANK
from horovod.runner.signals import SignalPipe
from horovod.runner.supervisor import Plans

PATIENCE_SECONDS = 600.0
LONGEST_COOLDOWN_SECONDS = 3600


def is_wanted(options: Options) -> bool:
    """Whether the user asks for an elastic job.

    Raises:
        ValueError: a flag for elastic jobs is given, but neither ``--min-np`` nor ``--host-discovery-script``.
    """
    if options.host_discovery_script is not None or options.min_num_proc is not None:
        return True
    only = {
        "--max-np": options.max_num_proc,
        "--slots-per-host": options.slots,
        "--elastic-timeout": options.elastic_timeout,
        "--reset-limit": options.reset_limit,
        "--blacklist-cooldown-range": options.cooldown_range,
        "--on-loss continue": options.tunables.get("on_loss") if _continues(options, {}) else None,
    }
    for flag, value in only.items():
        if value is not None:
            raise UsageError(f"{flag} is for elastic jobs; give --min-np or --host-discovery-script with it")
    return False


class ElasticJob(Job):
    """See :class:`Job`.

    Raises:
        ValueError: the request cannot be met.
    """

    def __init__(self, options: Options, environment: Mapping[str, str], *, hosts_python: bool = False) -> None:
        _check(options)
        source = self._find_source(options, environment)
        start = options.num_proc or options.min_num_proc or source.ranks
        if start is None:
            raise UsageError("the number of ranks is missing: give it with -np or --min-np, as in --min-np 2")
        self._source = source
        self._start = start
        self._least = options.min_num_proc or start
        self._most = options.max_num_proc
        if self._least > start or (self._most is not None and self._most < start):
            most = "" if self._most is None else f" and not more than --max-np ({self._most})"
            raise UsageError(f"-np ({start}) must be at least --min-np ({self._least}){most}")
        if isinstance(source, host_sources.ThisHost):
            self._source = host_sources.HostArgument(f"localhost:{max(start, self._most or 0)}")
        super().__init__(replace(options, num_proc=start, stdin=NO_RANK), environment, hosts_python=hosts_python)
        self._continues = _continues(options, environment)
        self._needs_first = config.goes_on(_asked(options, environment), [config.GOES_ON])
        if self._continues and self._changes:
            raise UsageError(
                "--on-loss continue does not support --host-discovery-script, because no rank can join such a job: name the "
                "hosts with -H, or "
                "use hvd.elastic.run"
            )
        self._patience = _patience(options, environment)

    @property
    def result_ranks(self) -> Sequence[int]:
        return range(self._least)

    def _find_source(self, options: Options, environment: Mapping[str, str]) -> host_sources.HostSource:
        return host_sources.choose(options, environment)

    def _choose_source(self) -> host_sources.HostSource:
        return self._source

    def _assign(self, ranks: int) -> list[SlotInfo]:
        return get_host_assignments(list(self._hosts.values()), 0 if self._changes else ranks, self._most)

    @property
    def _changes(self) -> bool:
        """Whether the hosts may change."""
        return isinstance(self._source, host_sources.ChangingHosts)

    @property
    def _most_from_one_address(self) -> int:
        return LARGEST_QUEUE if self._changes else super()._most_from_one_address

    @property
    def _serves_other_hosts(self) -> bool:
        return self._changes or super()._serves_other_hosts

    def run(
        self,
        stdout: Sink,
        stderr: Sink,
        signals: SignalPipe | None = None,
        published: Mapping[str, bytes] | None = None,
    ) -> Outcome:
        options = self._options
        self._make_room()
        output = JobOutput(
            stdout, stderr, len(self.slots), options.output_filename, timestamps=options.prefix_output_with_timestamp
        )
        limits = Limits(
            start=self._start,
            least=self._least,
            most=self._most,
            resets=options.reset_limit,
            patience=self._patience,
            starting=self._patience if self.attached else self._seconds,
            fixed=not self._changes,
            continues=self._continues,
            needs_first=self._needs_first,
            attached=self.attached,
        )
        policy = ElasticPolicy(
            JobState(limits, Blacklist(options.cooldown_range)), batch_job(self._launcher_environment)
        )
        with Cleanup() as cleanup, cleanup:
            server, secret = self._make_server(cleanup, published or {})
            mark = f"{config.SECRET_KEY}={secret}".encode()
            self._say_what_has_no_effect(output)
            loop = Loop()
            cleanup.callback(loop.close)
            here: list[Agent] = []

            def reach(host: HostInfo) -> Agent:
                if self._is_here(host):
                    if not here:
                        guardian = self._start_guardian(cleanup, mark, output)
                        facts = HostFacts(
                            sys.executable, usable_cores(), [name for _, name in socket.if_nameindex()], None
                        )
                        here.append(
                            LocalAgent(
                                [host.hostname], loop, supervisor.report, facts,
                                mark=mark, guardian=guardian, inherits_input=False,
                            )
                        )  # fmt: skip
                    return here[0]
                return self._reach(host, loop, supervisor.report, secret, server.address[1])

            def plan(agent: Agent, start: StartProcess) -> Plans:
                return self._plan(agent, start, server.address[1], secret)

            supervisor = ElasticSupervisor(
                loop, output, policy, server, reach=reach, plan=plan, seconds=self._seconds, signals=signals
            )
            cleanup.callback(supervisor.kill)
            owned(server.start)
            hosts = list(self._hosts.values())
            if isinstance(self._source, host_sources.ChangingHosts):
                cleanup.own(partial(Discovery, self._source, self._start, loop, supervisor.hosts_found, hosts))
            return supervisor.run_elastic(hosts)

    def _reach(self, host: HostInfo, loop: Loop, report: Report, secret: str, port: int) -> Agent:
        """The agent of another host; see :func:`horovod.runner.reach.reach.reach`."""
        from horovod.runner.reach.reach import reach  # costs time, which jobs on one host need not spend

        return reach(
            [host], self._options, self._launcher_environment,
            loop=loop, report=report, secret=secret, port=port, seconds=self._seconds,
        )[0]  # fmt: skip

    def _plan(self, agent: Agent, start: StartProcess, port: int, secret: str) -> Plans:
        """The plan and the environment to start a process with."""
        facts = agent.facts
        assert facts is not None
        here = isinstance(agent, LocalAgent)
        rendezvous = facts.rendezvous or (LOOPBACK, port)
        shared = self._shared(start.host.hostname, facts, here, rendezvous, secret, start.host.slots)
        own = self._own_environment(start.number, start.assignment)
        return shared, [ProcessPlan(start.number, self._command(facts), own)]

    ranks_are_fixed: ClassVar[bool] = False
    attached: ClassVar[bool] = False
    """Whether something else starts the processes, each of which is a host."""

    def _own_environment(self, number: int, slot: SlotInfo) -> dict[str, str]:
        return {
            **super()._own_environment(number, slot),
            config.ELASTIC: "1",
            config.ELASTIC_PROCESS: str(number),
        }

    def dry_run(self) -> str:
        if len(self.slots) >= self._start:
            return super().dry_run()
        from horovod.runner import dry_run  # costs time, which jobs that run need not spend

        return dry_run.describe([], (), [*self._notices(), *self._dry_run_lines()])

    def _dry_run_lines(self) -> Sequence[str]:
        most = "as many as there are slots" if self._most is None else f"at most {self._most}"
        resets = self._options.reset_limit
        hosts = ", ".join(f"{host.hostname}:{host.slots}" for host in self._hosts.values()) or "none"
        if self._changes:
            script = f"{self._options.host_discovery_script!r} is run every {PERIOD_SECONDS:.3g} s, and now prints"
            wait = f" It would wait for them, {self._patience:.6g} seconds at most."
        else:
            script, wait = "these and no others:", ""
        lines = [
            "",
            f"The job is elastic. A round has at least {self._least} ranks and {most}."
            + ("" if resets is None else f" Not more than {resets} rounds follow the first."),
            f"  Hosts: {script} {hosts}",
        ]
        found = sum(host.slots for host in self._hosts.values())
        if len(self.slots) < self._start:
            return [*lines, f"  It starts nothing until there are {self._start} slots; now there are {found}.{wait}"]
        return [*lines, f"  The first round has {len(self.slots)} ranks:"]


def _continues(options: Options, environment: Mapping[str, str]) -> bool:
    """Whether scripts go on when a rank is lost."""
    return config.goes_on(_asked(options, environment))


def _asked(options: Options, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Where ``--on-loss`` stands: the command line goes first."""
    asked = options.tunables.get("on_loss")
    return {config.ON_LOSS: str(asked)} if asked else environment


def _check(options: Options) -> None:
    if options.use_mpi or options.use_jsrun:
        raise UsageError(
            f"{'--mpi' if options.use_mpi else '--jsrun'} cannot start elastic jobs: it ends all ranks when one is lost. Leave "
            "it out, and horovodrun starts the ranks itself"
        )
    if options.stdin not in (None, NO_RANK):
        raise UsageError(
            "--stdin cannot be given for an elastic job: if the rank that reads is lost, no other rank could continue to read"
        )
    for flag, value in {"--min-np": options.min_num_proc, "--max-np": options.max_num_proc}.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, not {value}")
    if options.host_discovery_script is not None and (options.hosts is not None or options.hostfile is not None):
        raise UsageError("give either --host-discovery-script or hosts, not both")
    if options.cooldown_range is not None:
        shortest, longest = options.cooldown_range
        if not 1 <= shortest <= longest <= LONGEST_COOLDOWN_SECONDS:
            raise UsageError(
                f"--blacklist-cooldown-range {shortest} {longest}: give the shortest and the longest time in seconds, from 1 "
                f"to {LONGEST_COOLDOWN_SECONDS}"
            )


def _patience(options: Options, environment: Mapping[str, str]) -> float:
    if options.elastic_timeout is not None:
        return float(options.elastic_timeout)
    text = environment.get(config.ELASTIC_TIMEOUT, "").strip()
    if not text and _continues(options, environment):  # no rank can join: the job waits only for ranks that are there
        return _time_limit(options, environment) + HUNG_SECONDS
    try:
        return float(text) if text else PATIENCE_SECONDS
    except ValueError:
        raise UsageError(
            f"environment variable {config.ELASTIC_TIMEOUT}={text!r}: expected a number of seconds"
        ) from None


def _time_limit(options: Options, environment: Mapping[str, str]) -> float:
    """How long the ranks wait for one that does not answer."""
    asked = options.tunables.get("gloo_timeout_seconds") or environment.get(config.TIMEOUT_SECONDS, "")
    try:
        return config.Config.from_env({config.TIMEOUT_SECONDS: str(asked)}).timeout.total_seconds()
    except ValueError as error:
        raise UsageError(str(error)) from None
