"""A process that has imported a framework, and becomes rank processes by forking: an import costs seconds, a fork none.

    python -m rank_template DESCRIPTOR HOLDER MODULE

Over the socket come requests: the environment of a new process, as JSON, with two descriptors: its socket to the pool, and the
file for what it prints. The answer is its number. It is a child of the HOLDER of the other end, which is a subreaper while it
asks: the process that is forked first only forks once more, and its end leaves the second one to the holder. If either fork
fails, the template ends, and the holder quotes why. What goes wrong later is in the file for what the new process prints.

Ranks that are forked have one hash seed, and would have their memory at the same addresses. As in real jobs it must not matter
where memory lies on another rank, so each first moves what it allocates next by a random distance.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import mmap
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

import rank_worker
from eager import framework_imports
from time_limits import SOON

NUMBER = struct.Struct("<q")
HEAD = struct.Struct("<Q")
WHEN_USED = {"horovod.torch": ["torch._dynamo"], "horovod.keras": ["tensorflow"]}
"""What a framework imports when it is first used, which costs each process seconds: PyTorch with its first optimizer; Keras,
on every backend, when it first seeds random numbers."""
_PR_SET_CHILD_SUBREAPER = 36
_LIMIT_SECONDS = SOON
_kept: list[object] = []


class Forked:
    """A child of this process that a template has made; used as a :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not after ``timeout`` seconds.
        """
        if timeout is not None and self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                ready = _readable(descriptor, timeout)
            finally:
                os.close(descriptor)
            if not ready:
                raise subprocess.TimeoutExpired("a forked rank", timeout)
        status = self._wait(0)
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Template:
    """The process that is forked.

    Args:
        env: the environment in which the module is imported.
        folder: where its processes work.
    """

    def __init__(self, module: str, env: Mapping[str, str], folder: Path) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self.connection, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rank_template", str(other.fileno()), str(os.getpid()), module],
                env=env,
                cwd=folder,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
        self.connection.settimeout(_LIMIT_SECONDS)

    def fork(self, env: Mapping[str, str], connection: socket.socket, log: int) -> Forked:
        """A new process that serves ``connection`` and prints to ``log``.

        Raises:
            OSError: the template has ended, or does not answer.
        """
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            body = json.dumps(dict(env)).encode()
            descriptors = [connection.fileno(), log]
            socket.send_fds(self.connection, [HEAD.pack(len(body))], descriptors)
            self.connection.sendall(body)
            answer = self.connection.recv(NUMBER.size, socket.MSG_WAITALL)
        except ConnectionError:
            answer = b""
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if len(answer) < NUMBER.size:
            self.process.wait(_LIMIT_SECONDS)  # it has closed its end, and may have more to print
            raise OSError(f"the process that ranks are forked from has ended: {self.output()}")
        return Forked(*NUMBER.unpack(answer))

    def alive(self) -> bool:
        return self.process.poll() is None

    def output(self) -> str:
        """The end of what it has printed."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()
        self.log.close()

    def descriptors(self) -> set[int]:
        return {self.connection.fileno(), self.log.fileno()}


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# In the template.


def serve(connection: socket.socket) -> tuple[int, int, dict[str, str]] | None:
    """Fork for each request; None at the end. In a forked process: its descriptors and its environment."""
    with connection:
        while True:
            head, descriptors, _, _ = socket.recv_fds(connection, HEAD.size, 2)
            if len(head) < HEAD.size:
                return None
            body = connection.recv(HEAD.unpack(head)[0], socket.MSG_WAITALL)
            number = fork_to_holder()
            if number == 0:
                return descriptors[0], descriptors[1], json.loads(body)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(NUMBER.pack(number))


def fork_to_holder() -> int:
    """Fork a process whose parent, once this returns, is the holder. Its number; 0 in that process.

    Raises:
        OSError: a process could not be made.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            number = os.fork()
        except OSError:
            traceback.print_exc()
            os._exit(1)  # not as Python ends: this is a copy of a process that goes on
        if number:
            os.write(writing, NUMBER.pack(number))
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    answer = os.read(reading, NUMBER.size)
    os.close(reading)
    os.waitpid(between, 0)
    if len(answer) < NUMBER.size:
        raise OSError("the process between this one and a rank could not fork")
    return int(NUMBER.unpack(answer)[0])


def become(log: int, env: Mapping[str, str]) -> None:
    """Take over what a new process has of its own."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    _kept.append(bytearray(random.randrange(1 << 20)))
    _kept.append(mmap.mmap(-1, mmap.PAGESIZE * random.randrange(1, 1024)))


def end() -> None:
    """End as every process of Python does, but take nothing apart: that copies the memory shared with the template, a second
    of processor time for each rank.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # no public function waits for threads as a script's end does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    descriptor, holder, module = sys.argv[1:]
    rank_worker.die_with(int(holder))
    connection = socket.socket(fileno=int(descriptor))
    os.set_inheritable(int(descriptor), False)
    framework_imports.install()
    gc.disable()
    for name in (module, *WHEN_USED.get(module, [])):
        importlib.import_module(name)
    gc.freeze()  # a rank that looked through all of it would copy it
    gc.enable()
    forked = serve(connection)
    if forked is not None:
        link, log, env = forked
        become(log, env)
        rank_worker.die_with(int(holder))
        rank_worker.serve(link, [module])
        end()


if __name__ == "__main__":
    main()
