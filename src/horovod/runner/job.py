"""One job from the user's request to its outcome: places, environment, meeting place, guardian, supervision.

``horovodrun`` and ``horovod.run`` both come here; they differ in what each rank runs and where its output goes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from horovod.control.rendezvous_server import RendezvousServer
from horovod.control.secret import encode_secret, make_secret
from horovod.core import config
from horovod.runner import worker_environment
from horovod.runner.agent.base import Agent, HostFacts
from horovod.runner.agent.guardian import Guardian
from horovod.runner.agent.local import LocalAgent
from horovod.runner.agent.messages import ProcessPlan
from horovod.runner.errors import UsageError
from horovod.runner.hosts import HostInfo, SlotInfo, get_host_assignments, parse_host_files, parse_hosts
from horovod.runner.loop import Loop
from horovod.runner.machine import is_local, usable_cores
from horovod.runner.notices import without_effect
from horovod.runner.options import Options
from horovod.runner.outcome import Failure, Outcome
from horovod.runner.output import Output, Sink
from horovod.runner.policy import StaticPolicy
from horovod.runner.refusals import refuse_what_is_missing
from horovod.runner.signals import SignalPipe
from horovod.runner.standard_input import choose_reader, in_background
from horovod.runner.supervisor import Plans, Supervisor

MOST_RANKS = 1 << 16
"""Beyond this a number of ranks is a slip of the finger, and would fill the memory before anything is said."""
FAILURE_KEY = "failure"
"""Where the runtime says which rank failed first."""


class Job:
    """A checked request. Making one starts nothing.

    Args:
        options: the request; its ``command`` is what each rank runs.
        environment: the launcher's own.

    Raises:
        ValueError: the request cannot be met; the message says why.
    """

    def __init__(self, options: Options, environment: Mapping[str, str]) -> None:
        self._options = options
        self._launcher_environment = environment
        if not options.command:
            raise UsageError("no command given: what shall the ranks run? As in: horovodrun -np 2 python train.py")
        self.slots = _places(options)
        self._reader = choose_reader(options.stdin, len(self.slots))
        refuse_what_is_missing(options)
        _check_hosts(self.slots)
        _check_interfaces(options)
        _check_program(options.command[0], environment)
        self._asked = worker_environment.from_options(options)
        self._threads = worker_environment.threads(environment, usable_cores(), len(self.slots))
        self._memory = worker_environment.memory(environment)
        self._server: RendezvousServer | None = None

    def run(
        self,
        stdout: Sink,
        stderr: Sink,
        signals: SignalPipe | None = None,
        published: Mapping[str, bytes] | None = None,
    ) -> Outcome:
        """Start all ranks and stay with them to the end. Once only.

        Args:
            stdout, stderr: where the ranks' output goes.
            signals: where signals to this process arrive; None leaves them to Python.
            published: values for the ranks to fetch at the place where they meet.

        Raises:
            ValueError: the output folder cannot be written.
            LaunchError: a process could not be started.
        """
        options = self._options
        output = Output(
            stdout,
            stderr,
            len(self.slots),
            options.output_filename,
            timestamps=options.prefix_output_with_timestamp,
        )
        key = make_secret()
        secret = encode_secret(key)
        mark = f"{config.SECRET_KEY}={secret}".encode()
        self._server = server = RendezvousServer(key)
        with ExitStack() as cleanup:
            cleanup.callback(server.stop)
            for name, value in (published or {}).items():
                server.put(name, value)
            server.start()
            guardian = self._start_guardian(mark, output)
            if guardian is not None:
                cleanup.enter_context(guardian)
            for notice in without_effect(options):
                output.say(f"horovodrun: {notice}")
            if self._reader is not None and in_background():
                if options.stdin is not None:
                    output.say("horovodrun: --stdin has no effect: this job runs in the background of its terminal")
                self._reader = None
            if options.verbose:
                output.say(self._describe(server.address))
            loop = Loop()
            cleanup.callback(loop.close)
            supervisor = Supervisor(
                loop,
                output,
                StaticPolicy([slot.rank for slot in self.slots], self._reader),
                places={slot.rank: f"{slot.hostname}, local rank {slot.local_rank}" for slot in self.slots},
                accusation=self._accusation,
                departed=lambda rank, end: server.depart(rank, f"exit code {end}"),
                signals=signals,
                reader=self._reader,
            )
            here = LocalAgent(
                dict.fromkeys(slot.hostname for slot in self.slots),
                loop,
                supervisor.report,
                HostFacts(sys.executable, usable_cores(), (), None),
                mark=mark,
                guardian=guardian,
                inherits_input=True,
            )
            return supervisor.run([here], lambda agent: self._plans(agent, server.address, secret))

    def _plans(self, agent: Agent, address: tuple[str, int], secret: str) -> Plans:
        """What to start on a host."""
        plans = [
            ProcessPlan(
                slot.rank,
                self._options.command,
                worker_environment.of_rank(slot),
                reads_input=slot.rank == self._reader,
            )
            for slot in self.slots
            if slot.hostname in agent.hosts
        ]
        common = {**self._launcher_environment, **self._asked, **self._threads, **self._memory}
        return {**common, **worker_environment.meeting_place(address, secret)}, plans

    def delivered(self, key: str) -> bytes | None:
        """What a rank has put under ``key`` where they meet; None if nothing."""
        return None if self._server is None else self._server.peek(key)

    def _start_guardian(self, mark: bytes, output: Output) -> Guardian | None:
        environment = {
            name: value for name, value in self._launcher_environment.items() if name != config.SECRET_KEY
        }  # fmt: skip
        try:
            return Guardian(mark, environment)
        except OSError as error:
            output.say(
                f"horovodrun: cannot start the guardian ({error.strerror}): should this launcher be killed, "
                "its ranks would have to be ended by hand"
            )
            return None

    def _accusation(self) -> Failure | None:
        value = self.delivered(FAILURE_KEY)
        if value is None:
            awaited = None if self._server is None else self._server.awaited_in_vain()
            return None if awaited is None else Failure(*awaited)
        try:
            content = json.loads(value)
            return Failure(int(content["rank"]), str(content["reason"]))
        except (ValueError, KeyError, TypeError):
            return None  # whoever wrote this is not our runtime

    def _describe(self, address: tuple[str, int]) -> str:
        host, port = address
        words = [f"horovodrun: {len(self.slots)} ranks of: {' '.join(self._options.command)}"]
        words += [f"  rank {slot.rank}: {slot.hostname}, local rank {slot.local_rank}" for slot in self.slots]
        words.append(f"  they meet at {host}:{port}")
        if self._reader is not None:
            words.append(f"  rank {self._reader} reads standard input")
        words += [f"  {name}={value}" for name, value in sorted(self._asked.items())]
        if self._threads:
            share = ", ".join(f"{name}={value}" for name, value in self._threads.items())
            words.append(f"  {share}: a fair share of {usable_cores()} cores; set either to choose for yourself")
        else:
            words.append("  threads of OpenMP and MKL: as you have set them")
        if self._memory:
            limits = ", ".join(f"{name}={value}" for name, value in self._memory.items())
            words.append(f"  {limits}: memory of one step is kept for the next; set either to choose for yourself")
        return "\n".join(words)


def _places(options: Options) -> list[SlotInfo]:
    if options.num_proc is None:
        raise UsageError("how many ranks? Say it with -np, as in -np 2")
    if not hasattr(options.num_proc, "__index__"):
        raise UsageError(f"the number of ranks must be a whole number, not {options.num_proc!r}")
    if not 1 <= options.num_proc <= MOST_RANKS:
        raise UsageError(f"the number of ranks must be at least 1 and at most {MOST_RANKS}, not {options.num_proc}")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = parse_hosts(parse_host_files(options.hostfile))
    else:
        hosts = [HostInfo("localhost", options.num_proc)]
    # Never more ranks than asked for: a list of hosts says where ranks may run, not how many there are.
    return get_host_assignments(hosts, options.num_proc, options.num_proc)


def _check_hosts(slots: Sequence[SlotInfo]) -> None:
    for hostname in dict.fromkeys(slot.hostname for slot in slots):
        try:
            local = is_local(hostname)
        except OSError as error:
            raise UsageError(f"host {hostname} has no address: {error.strerror}. Is its name right?") from None
        if not local:
            raise UsageError(
                f"host {hostname} is not this machine, and several hosts are not supported yet; use -H localhost:<slots>"
            )


def _check_interfaces(options: Options) -> None:
    if options.nics:
        known = {name for _, name in socket.if_nameindex()}
        for nic in options.nics:
            if nic not in known:
                raise UsageError(f"there is no network interface {nic} here; there are {', '.join(sorted(known))}")


def _check_program(program: str, environment: Mapping[str, str]) -> None:
    """Better one clear word now than the same failure from every rank."""
    if shutil.which(program, path=environment.get("PATH")) is not None:
        return
    if program.endswith(".py") and Path(program).is_file():
        hint = f"; did you mean `{Path(sys.executable).name} {program}`?"
    elif len(program.split()) > 1:
        hint = f"; write it without quotes: {program}"
    else:
        hint = ""
    if Path(program).is_dir() and os.sep in program:
        raise UsageError(f"command is a directory: {program}")
    if os.sep not in program or not os.access(program, os.F_OK):
        raise UsageError(f"command not found: {program or repr(program)}{hint}")
    raise UsageError(f"command is not executable: {program}{hint}")
