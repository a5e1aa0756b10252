"""One process of a rank pool: receives functions, runs each in its main thread, answers with what came of it.

``python -m rank_worker DESCRIPTOR PARENT [MODULE]``: a connected socket to the pool, the pool's process, and a module to
import before it reports for work. SIGUSR1 prints the stacks of all threads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Sequence

import cloudpickle

LENGTH = struct.Struct("<Q")
STACKS = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


def perform(request: bytes) -> bytes:
    """Run a pickled ``(function, arguments)``; the answer, pickled.

    An answer is what the function returned and "", or the exception that it raised (None if that cannot be pickled) and
    the text of its traceback.
    """
    try:
        function, arguments = cloudpickle.loads(request)
        return bytes(cloudpickle.dumps((function(*arguments), "")))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = cloudpickle.dumps((error.with_traceback(None), text))
            pickle.loads(answer)  # some exceptions can be pickled, but not back
        except Exception:
            answer = cloudpickle.dumps((None, text))
        return bytes(answer)


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None when the pool has closed the connection."""

    def exactly(length: int) -> bytes | None:
        data = bytearray()
        while len(data) < length:
            part = connection.recv(length - len(data))
            if not part:
                return None
            data += part
        return bytes(data)

    head = exactly(LENGTH.size)
    return None if head is None else exactly(LENGTH.unpack(head)[0])


def die_with(parent: int) -> None:
    """Whatever becomes of the pool's process, this one ends with it. A process that was forked waits until it is its child."""
    for _ in range(1000):
        if os.getppid() == parent:
            break
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """Import the modules, and run what comes over the socket, until the pool closes it."""
    os.set_inheritable(descriptor, False)
    # Of a crash only the thread that crashed: the others run on while their frames are read, which crashes once more.
    faulthandler.enable(all_threads=False)
    faulthandler.register(STACKS, all_threads=True)
    with socket.socket(fileno=descriptor) as connection:
        for module in modules:
            importlib.import_module(module)
        answer = cloudpickle.dumps((None, ""))
        while True:
            sys.stdout.flush()
            sys.stderr.flush()
            connection.sendall(LENGTH.pack(len(answer)) + answer)
            request = receive(connection)
            if request is None:
                return
            answer = perform(request)


def main() -> None:
    descriptor, parent, *modules = sys.argv[1:]
    die_with(int(parent))
    serve(int(descriptor), modules)


if __name__ == "__main__":
    main()
