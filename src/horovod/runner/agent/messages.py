"""The messages between the launcher and the agent of a host.

In the launcher's own process they are passed as objects. To and from another host they travel as frames
(:mod:`horovod.control.channel`) over a byte stream that ssh or srun provides and has authenticated.

A process is known by the number that the launcher gives it, which no other process of the job has. A static job numbers its
processes by rank.
"""

from __future__ import annotations

import signal as signals

import msgspec

GREETING = b"\0horovod agent\0"
"""The first bytes that an agent writes. A login shell may have written text before them."""
CHUNK_BYTES = 1 << 16
"""The most output that one message carries, in bytes."""


class Exit(msgspec.Struct, frozen=True, array_like=True):
    """How a process ended."""

    code: int
    """The exit code, or 128 + the number of the signal; 255 if it is not known."""
    signal: int = 0
    """The signal that ended it, or 0."""
    reason: str = ""
    """Why the exit code is not known: the process was lost together with its host."""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.code} ({self.reason})"
        if not self.signal:
            return str(self.code)
        try:
            name = signals.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        return f"{self.code} (killed by {name})"


class ProcessPlan(msgspec.Struct, frozen=True, array_like=True):
    """A process to start."""

    number: int
    command: tuple[str, ...]
    environment: dict[str, str]
    """Variables of this process alone, beside those that all processes have."""
    reads_input: bool = False


# To the agent.


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Get ready. Sent once, before everything else."""

    secret: str
    """The job's secret, encoded."""
    directory: str
    """The working directory of the processes; "" for that in which the agent was started."""
    addresses: list[tuple[str, int]]
    """Addresses of the launcher's rendezvous server. The agent uses one that it can reach."""
    seconds: float
    """How long the agent may try to reach it."""


class StartProcesses(msgspec.Struct, frozen=True, tag=True):
    """Start processes."""

    environment: dict[str, str]
    """In addition to the agent's own environment."""
    plans: list[ProcessPlan]


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to processes and what they started."""

    number: int
    processes: list[int]


class Look(msgspec.Struct, frozen=True, tag=True):
    """Report the ends of processes that have not been reported yet, and then :class:`Stopped`."""


class Input(msgspec.Struct, frozen=True, tag=True):
    """Standard input for a process; empty data closes it."""

    process: int
    data: bytes


class End(msgspec.Struct, frozen=True, tag=True):
    """End what still runs: SIGTERM, and SIGKILL ``grace`` seconds later. Then send :class:`Closed`, and end."""

    grace: float
    hunt: bool
    """Whether to look for processes of the job outside their sessions, too."""


# From the agent.


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message: the agent describes its host."""

    version: str
    """The version of the distribution; the launcher's must be the same."""
    python: str
    """The interpreter that runs the agent."""
    cores: int
    """The number of cores that a job may use."""
    interfaces: list[str]
    """The names of the host's network interfaces."""


class AgentReady(msgspec.Struct, frozen=True, tag=True):
    """Processes can be started."""

    rendezvous: tuple[str, int]
    """The address at which this host reaches the launcher's rendezvous server."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The answer to :class:`Prepare` if this host cannot take part. The agent ends."""

    reason: str


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """A process could not be started."""

    process: int
    reason: str


class OutputData(msgspec.Struct, frozen=True, tag=True):
    """A process has written to one of its streams; empty data is the end of the stream."""

    process: int
    stream: str
    data: bytes


class InputConsumed(msgspec.Struct, frozen=True, tag=True):
    """A process has taken all the standard input it was given."""

    process: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process has ended."""

    process: int
    exit: Exit


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The answer to :class:`Look`."""

    processes: list[int]
    """Those that are stopped (SIGSTOP, Ctrl-Z)."""


class Signalled(msgspec.Struct, frozen=True, tag=True):
    """The agent got a signal that did not come from the launcher: a batch system signals all processes of a job."""

    number: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The agent, or the connection to it, is lost, and with it all of its processes."""

    reason: str


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The answer to :class:`End`, and the last message."""

    immortal: list[int]
    """Process ids that even SIGKILL did not end."""


AgentOrder = Prepare | StartProcesses | Signal | Look | Input | End
AgentEvent = (
    Hello | AgentReady | Refused | NotStarted | OutputData | InputConsumed | Ended | Stopped | Signalled | Lost | Closed
)

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(AgentOrder).decode
decode_event = msgspec.msgpack.Decoder(AgentEvent).decode
