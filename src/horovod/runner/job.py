"""One job from the user's request to its outcome: rank assignment, agents, environment, rendezvous, supervision.

``horovodrun`` and ``horovod.run`` both use this; they differ in what each rank runs and where its output goes.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from horovod._base import config
from horovod.control.dial import anywhere
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import encode_secret, make_secret
from horovod.runner import flight_recorders, open_files, worker_environment
from horovod.runner.agent.base import Agent, HostFacts, Report
from horovod.runner.agent.guardian import Guardian
from horovod.runner.agent.local_agent import LocalAgent
from horovod.runner.agent.messages import ProcessPlan
from horovod.runner.checks import (
    batch_job,
    check_autotuning,
    check_entry_point,
    check_interfaces,
    check_program,
    is_here,
    number_of_ranks,
    with_absolute_python_path,
)
from horovod.runner.children import Cleanup, owned
from horovod.runner.errors import UsageError
from horovod.runner.event_loop import Loop
from horovod.runner.hosts import host_sources
from horovod.runner.hosts.slots import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.machine import port_below_ephemeral, usable_cores
from horovod.runner.options import Options
from horovod.runner.output.notices import without_effect
from horovod.runner.output.outcome import Outcome, ReportedFailure
from horovod.runner.output.output import JobOutput, Sink
from horovod.runner.output.standard_input import choose_reader, in_background
from horovod.runner.policy import StaticPolicy
from horovod.runner.signals import SignalPipe
from horovod.runner.supervisor import Plans, Supervisor

FAILURE_KEY = "failure"
"""The key under which the runtime reports which rank failed first."""
LOOPBACK = "127.0.0.1"


class Job:
    """A checked request. The constructor starts nothing.

    Args:
        options: the request; its ``command`` is what each rank runs.
        environment: the launcher's environment.
        hosts_python: whether to replace the command's first argument, an interpreter, by the one that runs each host's agent.

    Raises:
        ValueError: the request cannot be met; the message says why.

    Attributes:
        ranks_are_fixed: each process keeps its rank from its start to its end.
    """

    ranks_are_fixed: ClassVar[bool] = True

    def __init__(self, options: Options, environment: Mapping[str, str], *, hosts_python: bool = False) -> None:
        self._options = options
        self._launcher_environment = with_absolute_python_path(environment)
        self._hosts_python = hosts_python
        if not options.command:
            raise UsageError(
                "no command given: name the program that the ranks run, as in horovodrun -np 2 python train.py"
            )
        source = self._choose_source()
        ranks = number_of_ranks(source.ranks if options.num_proc is None else options.num_proc)
        self._hosts = {host.hostname: host for host in source.hosts(ranks)}
        self.slots = self._assign(ranks)
        self._reader = choose_reader(options.stdin, len(self.slots))
        names = dict.fromkeys(slot.hostname for slot in self.slots)
        self._here = [name for name in names if self._is_here(self._hosts[name])]
        self._elsewhere = [name for name in names if name not in self._here]
        if self._here:
            check_program(options.command[0], environment)
        if not self._elsewhere:
            check_interfaces(options.nics)
        self._asked = worker_environment.from_options(options)
        if config.TORCH_BACKEND in self._asked:
            check_entry_point()
        if self._asked.get(config.AUTOTUNE) == "1":
            check_autotuning(options.command[0], environment)
        self._memory = worker_environment.memory(environment)
        self._seconds = worker_environment.start_timeout(options, environment)
        self._server: RendezvousServer | None = None
        self._recorders = flight_recorders.folder_of_new_job(environment)
        self._began = time.time()
        self._torch_port = port_below_ephemeral()

    @property
    def result_ranks(self) -> Sequence[int]:
        """The ranks whose results ``horovod.run`` returns."""
        return range(len(self.slots))

    def _choose_source(self) -> host_sources.HostSource:
        return host_sources.choose(self._options, self._launcher_environment)

    def _is_here(self, host: HostInfo) -> bool:
        """Whether this process starts the ranks of the host itself."""
        return is_here(host, self._launcher_environment)

    def _assign(self, ranks: int) -> list[SlotInfo]:
        """The assignments of exactly ``ranks`` ranks: a list of hosts says where ranks may run, not how many there are."""
        return get_host_assignments(list(self._hosts.values()), ranks, ranks)

    def run(
        self,
        stdout: Sink,
        stderr: Sink,
        signals: SignalPipe | None = None,
        published: Mapping[str, bytes] | None = None,
    ) -> Outcome:
        """Start all ranks, and supervise them until the job ends. Can be called once.

        Args:
            stdout, stderr: where the ranks' output goes.
            signals: where signals to this process arrive; None leaves them to Python.
            published: values for the ranks to fetch from the rendezvous server.

        Raises:
            ValueError: the output folder cannot be written.
            LaunchError: this process may not open enough files, a host cannot take part, or a process could not be started.
        """
        options = self._options
        self._make_room()
        output = JobOutput(
            stdout,
            stderr,
            len(self.slots),
            options.output_filename,
            timestamps=options.prefix_output_with_timestamp,
        )
        with Cleanup() as cleanup, cleanup:
            server, secret = self._serve(cleanup, published or {})
            mark = f"{config.SECRET_KEY}={secret}".encode()
            guardian = self._start_guardian(cleanup, mark, output) if self._here else None
            self._say_what_has_no_effect(output)
            loop = Loop()
            cleanup.callback(loop.close)
            supervisor = Supervisor(
                loop,
                output,
                StaticPolicy([slot.rank for slot in self.slots], self._reader, batch_job(self._launcher_environment)),
                locations={slot.rank: f"{slot.hostname}, local rank {slot.local_rank}" for slot in self.slots},
                reported_failure=self._reported_failure,
                departed=lambda rank, end: server.depart(rank, f"exit code {end}"),
                signals=signals,
                reader=self._reader,
            )
            cleanup.callback(supervisor.kill)
            agents: list[Agent] = []
            if self._here:
                facts = HostFacts(sys.executable, usable_cores(), [name for _, name in socket.if_nameindex()], None)
                agents.append(
                    LocalAgent(
                        self._here, loop, supervisor.report, facts, mark=mark, guardian=guardian, inherits_input=True
                    )
                )
            port = server.address[1]
            if self._elsewhere:

                def reach_others() -> None:
                    for agent in self._reach_others(loop, supervisor.report, secret, port):
                        agents.append(agent)
                        cleanup.callback(agent.kill)  # if it did not end with the job

                owned(reach_others)

            def plans() -> list[Plans]:
                rendezvous = [self._rendezvous_address(agent, agents, port) for agent in agents]
                if options.verbose:
                    from horovod.runner.description import describe

                    output.say(
                        describe(
                            options.command, self.slots, agents, rendezvous, self._launcher_environment,
                            asked=self._asked, memory=self._memory, reader=self._reader,
                        )
                    )  # fmt: skip
                return [
                    self._plans(agent.hosts, agent.facts, isinstance(agent, LocalAgent), address, secret)
                    for agent, address in zip(agents, rendezvous, strict=True)
                    if agent.facts is not None
                ]

            return supervisor.run(agents, plans, self._seconds)

    def _reach_others(self, loop: Loop, report: Report, secret: str, port: int) -> list[Agent]:
        """The agents of the other hosts; see :func:`horovod.runner.reach.reach.reach`."""
        from horovod.runner.reach.reach import reach  # costs time, which a job on one host need not spend

        return reach(
            [self._hosts[name] for name in self._elsewhere], self._options, self._launcher_environment,
            loop=loop, report=report, secret=secret, port=port, seconds=self._seconds,
        )  # fmt: skip

    def _make_room(self) -> None:
        """Raise this process's limit on open files for the whole job, before anything of it starts."""
        ranks, hosts = len(self.slots), len(self._elsewhere)
        here = sum(slot.hostname in self._here for slot in self.slots)
        open_files.make_room(
            open_files.RANK * ranks + open_files.PROCESS * here + open_files.HOST * hosts,
            f"the launcher of {ranks} ranks, {here} of them on its own host, with {hosts} other hosts",
        )

    def dry_run(self) -> str:
        """The processes that :meth:`run` would start, as text. Starts nothing, and contacts no host.

        Raises:
            ValueError: the environment's settings of ssh do not parse.
            LaunchError: this host has none of the network interfaces that the job may use.
        """
        from horovod.runner import dry_run
        from horovod.runner.reach import reach

        own = self._launcher_environment
        directory = reach.working_directory(own)
        parts: list[dry_run.HostPart] = []
        hosts = [self._hosts[name] for name in self._elsewhere]
        addresses = reach.launcher_addresses(self._options) if hosts else ()
        if self._here:
            facts = HostFacts(sys.executable, usable_cores(), [name for _, name in socket.if_nameindex()], None)
            rendezvous = (dry_run.ADDRESS if hosts else LOOPBACK, 0)
            shared, plans = self._plans(self._here, facts, True, rendezvous, "")
            parts.append(dry_run.HostPart(self._here, directory, dry_run.hide(shared), own, plans))
        forwarded = worker_environment.forwarded(own)
        for host, command in zip(hosts, reach.command_lines(hosts, self._options, own, self._seconds), strict=True):
            facts = HostFacts(sys.executable, 1, self._options.nics, None)  # what its agent would report is not known
            shared, plans = self._plans([host.hostname], facts, False, (dry_run.ADDRESS, 0), "")
            shared = {**shared, **dict.fromkeys(worker_environment.threads(own, 1, 1), dry_run.CORES)}
            parts.append(
                dry_run.HostPart([host.login], directory, dry_run.hide(shared), forwarded, plans, command.arguments)
            )
        return dry_run.describe(parts, addresses, [*self._notices(), *self._dry_run_lines()])

    def _dry_run_lines(self) -> Sequence[str]:
        """The text of :meth:`dry_run` about the job, before the text about its hosts."""
        return ()

    def _serve(self, cleanup: Cleanup, published: Mapping[str, bytes]) -> tuple[RendezvousServer, str]:
        """Start the rendezvous server. Returns it, and the job's secret as the text of an environment variable."""
        server, secret = self._make_server(cleanup, published)
        owned(server.start)
        return server, secret

    def _make_server(self, cleanup: Cleanup, published: Mapping[str, bytes]) -> tuple[RendezvousServer, str]:
        key = make_secret()
        # Other hosts must be able to reach it. A client without the secret is disconnected in either case.
        host = self._listens_at() if self._serves_other_hosts else LOOPBACK
        self._server = server = RendezvousServer(key, host, expected=self._most_from_one_address)
        cleanup.callback(server.stop)
        for name, value in published.items():
            server.put(name, value)
        return server, encode_secret(key)

    @property
    def _most_from_one_address(self) -> int:
        """How many connections may be made with the server at a time from one address, behind which all hosts may be."""
        return 2 * len(self.slots)  # a rank may connect again while it is connected

    def _listens_at(self) -> str:
        from horovod.runner.reach.reach import launcher_addresses  # as in run()

        return anywhere(launcher_addresses(self._options))

    @property
    def _serves_other_hosts(self) -> bool:
        """Whether ranks on other hosts have to reach the server."""
        return bool(self._elsewhere)

    def _notices(self) -> Sequence[str]:
        """One line for each flag that has been given and has no effect."""
        return without_effect(self._options, several_hosts=bool(self._elsewhere))

    def _say_what_has_no_effect(self, output: JobOutput) -> None:
        for notice in self._notices():
            output.say(f"horovodrun: {notice}")
        if self._reader is not None and in_background():
            if self._options.stdin is not None:
                output.say("horovodrun: --stdin has no effect: this job runs in the background of its terminal")
            self._reader = None

    def delivered(self, key: str) -> bytes | None:
        """The value that a rank has put under ``key`` at the rendezvous server; None if there is none."""
        return None if self._server is None else self._server.peek(key)

    @staticmethod
    def _rendezvous_address(agent: Agent, agents: Sequence[Agent], port: int) -> tuple[str, int]:
        """The address at which the ranks of a host reach the rendezvous server.

        Ranks on the launcher's own host use the address at which the first of the other hosts reaches it, if there is one.
        """
        found = [each.facts.rendezvous for each in (agent, *agents) if each.facts and each.facts.rendezvous]
        return found[0] if found else (LOOPBACK, port)

    def _plans(
        self, hosts: Sequence[str], facts: HostFacts, here: bool, rendezvous: tuple[str, int], secret: str
    ) -> Plans:
        """The processes to start on a host.

        Args:
            hosts: its names.
            facts: what its agent has reported.
            here: whether it is the launcher's host.
            rendezvous: the address at which it reaches the rendezvous server.
            secret: the job's secret, encoded.
        """
        slots = [slot for slot in self.slots if slot.hostname in hosts]
        return self._shared(", ".join(hosts), facts, here, rendezvous, secret, len(slots)), [
            ProcessPlan(
                slot.rank, self._command(facts), self._own_environment(slot.rank, slot), slot.rank == self._reader
            )
            for slot in slots
        ]  # fmt: skip

    def _own_environment(self, number: int, slot: SlotInfo) -> dict[str, str]:
        """The environment variables of process ``number`` alone, which has the ranks of ``slot``."""
        of_torch = worker_environment.torch_rank(slot)
        return {**worker_environment.of_rank(slot), **of_torch}

    def _command(self, facts: HostFacts) -> tuple[str, ...]:
        command = self._options.command
        return (facts.python, *command[1:]) if self._hosts_python else command

    def _shared(
        self, host: str, facts: HostFacts, here: bool, rendezvous: tuple[str, int], secret: str, ranks: int
    ) -> Mapping[str, str]:
        """The environment variables of all ranks of a host.

        Args:
            here: whether it is the launcher's host.
            ranks: how many ranks it has.
        """
        own = self._launcher_environment
        return {
            **(own if here else worker_environment.forwarded(own)),
            **self._asked,
            **worker_environment.interfaces_of_host(self._options.nics, facts.interfaces, host),
            **worker_environment.threads(own, facts.cores, ranks),
            **self._memory,
            **self._recorder_variables(),
            **worker_environment.rendezvous_point(rendezvous, secret),
            **self._torch_store(rendezvous[0]),
        }

    def _recorder_variables(self) -> dict[str, str]:
        return {config.FLIGHT_RECORDER_DIR: str(self._recorders)}

    def recorder_notice(self, outcome: Outcome) -> str:
        """The text that names the flight recorders of a failed job's ranks; "" if they have written none."""
        return flight_recorders.notice(self._recorders, outcome, self._began, self._serves_other_hosts)

    def _torch_store(self, launcher: str) -> dict[str, str]:
        """The address for the store of torch.distributed on rank 0, if its script needs one.

        Args:
            launcher: the address at which a host's ranks reach the launcher's host.
        """
        if not self.ranks_are_fixed:
            return {}
        host = self.slots[0].hostname
        address = launcher.partition(",")[0] if host in self._here else host
        return worker_environment.torch_store(self._launcher_environment, address, str(self._torch_port))

    def _start_guardian(self, cleanup: Cleanup, mark: bytes, output: JobOutput) -> Guardian | None:
        environment = {
            name: value for name, value in self._launcher_environment.items() if name != config.SECRET_KEY
        }  # fmt: skip
        try:
            guardian: Guardian = cleanup.own(lambda: Guardian(mark, environment))
            return guardian
        except OSError as error:
            output.say(
                f"horovodrun: cannot start the guardian ({error.strerror}): if this launcher is killed, "
                "you must end its ranks by hand"
            )
            return None

    def _reported_failure(self) -> ReportedFailure | None:
        value = self.delivered(FAILURE_KEY)
        if value is not None:
            return ReportedFailure.decoded(value)
        awaited = None if self._server is None else self._server.exchanges.awaited_in_vain()
        return None if awaited is None else ReportedFailure(*awaited)
