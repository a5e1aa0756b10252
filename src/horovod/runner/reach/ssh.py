"""Agents on other hosts through ssh: the stream of messages is ssh's standard input and output.

The command line names the interpreter, and says nothing about the job. ssh asks no questions here: where it would ask, the job
fails with a line that says what to do.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovod._base import config
from horovod.runner.errors import UsageError
from horovod.runner.reach.child_connection import ChildConnection

PROBE_SECONDS = 5
UNANSWERED_PROBES = 2
LOST_AFTER_SECONDS = PROBE_SECONDS * (UNANSWERED_PROBES + 1)
"""ssh gives a host up when it would have to send one probe more than ``UNANSWERED_PROBES``."""
_LONGEST_CONNECT_SECONDS = 10
_OF_SSH_ITSELF = 255
"""The exit status of an ssh that failed, or whose command was killed."""

_SCRIPT = (
    'if [ ! -x "$1" ]; then PATH="$2:$PATH"; set -- "$(command -v python3)" "$2" "$3"; fi; '
    '[ -n "$1" ] || { echo "no python3 on the PATH" >&2; exit 127; }; '
    '[ -z "$3" ] || export PYTHONPATH="$3"; '
    'exec "$1" -c "import sys; sys.path = [entry for entry in sys.path if entry]; '
    'from horovod.runner.agent.program import main; main()"'
)
"""The command for a shell on the host: it runs the launcher's interpreter, if it exists there, else the first python3. Modules
must not be imported from the working directory: it is the user's home, which may have a folder called horovod."""

_EXPLANATIONS: tuple[tuple[str, str], ...] = (
    (r"could not resolve hostname", "its name is unknown: is it spelled correctly?"),
    (r"remote host identification has changed", "its host key differs from the known one; if that is expected, remove the old "
    "key with ssh-keygen -R"),
    (r"host key verification failed", "its host key is not trusted: connect to it once by hand"),
    (r"identity file .* not accessible|load key ", "the key of --ssh-identity-file cannot be read"),
    (r"permission denied", "it does not accept the key: ssh must work without a password; choose a key with -i"),
    (r"connection refused", "nothing listens at its ssh port: does sshd run there, at that port (-p)?"),
    (r"no route to host|network is unreachable", "there is no route to it"),
    (r"timed out", "it does not answer: is it switched on, and reachable from here?"),
    (r"\(notfound\): pods", "the pod does not exist, or no longer exists"),
    (r"container not found|is not running|unable to upgrade connection", "its pod does not run, or does not run yet"),
    (r"\(forbidden\)", "the launcher's service account may not run commands in pods: it needs the right to create pods/exec"),
    (r"no python3 on the path", "there is no Python: neither the launcher's interpreter nor a python3 on the PATH"),
    (r"no module named '?horovod", "Horovod is not installed for its Python"),
    (r"no module named '?([\w.]+)", "a package that Horovod needs is not installed there"),
)  # fmt: skip
_OF_NO_INTEREST = re.compile(r"^warning: permanently added |^(shared )?connection to .* closed", re.IGNORECASE)
_NOT_RESPONDING = re.compile(r"server \S+ not responding", re.IGNORECASE)


class SshOptions(NamedTuple):
    """How to reach hosts."""

    command: tuple[str, ...]
    """``ssh``, or what the user runs instead; the launcher adds its options."""
    port: int | None
    identity_file: str | None
    seconds: float
    """How long a connection may take."""


def options(environment: Mapping[str, str], port: int | None, identity_file: str | None, seconds: float) -> SshOptions:
    """The user's settings of ssh.

    Raises:
        ValueError: the environment variable does not parse.
    """
    text = environment.get(config.SSH_COMMAND, "").strip() or "ssh"
    try:
        command = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"environment variable {config.SSH_COMMAND}={text!r}: {error}") from None
    return SshOptions(command, port, identity_file, seconds)


def ssh_arguments(options: SshOptions) -> list[str]:
    """ssh and its options, up to the name of a host."""
    settings = {
        "BatchMode": "yes",  # no questions
        "StrictHostKeyChecking": "accept-new",
        "ConnectTimeout": str(max(1, min(_LONGEST_CONNECT_SECONDS, round(options.seconds / 2)))),
        "ServerAliveInterval": str(PROBE_SECONDS),
        "ServerAliveCountMax": str(UNANSWERED_PROBES),
        "LogLevel": "INFO",  # at a lower level it does not print that a host has stopped answering
        # A user's configuration may set these for interactive sessions, where they would break this one:
        "ControlPath": "none",
        "ClearAllForwardings": "yes",
        "ForwardX11": "no",
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "PermitLocalCommand": "no",
    }
    found = [*options.command]
    for name, value in settings.items():
        found += ["-o", f"{name}={value}"]
    if options.port is not None:
        found += ["-p", str(options.port)]
    if options.identity_file is not None:
        found += ["-i", options.identity_file]
    return found


def command_line(options: SshOptions, host: str, python: str, environment: Mapping[str, str]) -> list[str]:
    """The command that starts an agent.

    Args:
        host: for ssh: ``host`` or ``user@host``.
        python: the launcher's interpreter.
        environment: the source of PATH and PYTHONPATH.
    """
    return [*ssh_arguments(options), host, agent_command(python, environment)]


def agent_command(python: str, environment: Mapping[str, str]) -> str:
    """The command for a shell on another host; the arguments are those of :func:`command_line`."""
    given = (python, environment.get("PATH", ""), environment.get("PYTHONPATH", ""))
    return "exec /bin/sh -c " + " ".join(map(shlex.quote, (_SCRIPT, "horovod-agent", *given)))


class Ssh(ChildConnection):
    """A running ssh, or a program that takes its place.

    Args:
        name: its name in errors.
    """

    def __init__(self, command: Sequence[str], name: str = "ssh") -> None:
        super().__init__(command)
        self._name = name

    def say_why(self, status: int, errors: str, preamble: str) -> str:
        return explain(status, errors, preamble, self._name)


def explain(status: int, errors: str, preamble: str = "", name: str = "ssh") -> str:
    """Why ssh, or the agent behind it, ended. Pure.

    Args:
        status: its exit status.
        errors: the text that it wrote to standard error.
        preamble: the output of a login shell before an agent began.
        name: the name of the program that ran: ssh, or one that takes its place.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not _OF_NO_INTEREST.search(line)]
    last = lines[-1] if lines else ""
    if _NOT_RESPONDING.search(errors):
        return f"it has not answered for {LOST_AFTER_SECONDS} seconds ({last})"
    for pattern, explanation in _EXPLANATIONS:
        match = re.search(pattern, errors, re.IGNORECASE)
        if match:
            line = next((line for line in reversed(lines) if re.search(pattern, line, re.IGNORECASE)), last)
            return f"{explanation} ({line})"
    said = [line.strip() for line in preamble.splitlines() if line.strip()]
    if status < 0:
        text = f"{name} was killed by {signal.Signals(-status).name}"
    elif status == _OF_SSH_ITSELF and not last:
        text = "it was killed, or the connection broke"
    else:
        text = f"{name}, or the agent that it started, ended with exit status {status}"
    if last:
        text += f": {last}"
    return text + (f"; its login shell wrote: {said[-1]}" if said else "")
