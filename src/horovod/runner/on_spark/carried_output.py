"""The ranks' output on its way from the task of rank 0 to the driver.

Lines go to the driver at once if it can be reached from there, and otherwise with the results. A driver behind a network that
drops connections delays nothing: the connection is made on a thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import takewhile

from horovod.control.dial import Address
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError
from horovod.runner.output.output import Sink

KEY = "spark/output/"
"""The beginning of the keys of what is sent; the name of the stream follows."""
MOST_CHARACTERS = 1 << 20
"""The most output that waits."""
_CONNECT_SECONDS = 20.0
_SEND_SECONDS = 30.0


class CarriedOutput:
    """A context manager, in the task.

    Args:
        driver: the addresses of the driver's server; empty if it has none.
        secret: of that server.
    """

    def __init__(self, driver: Sequence[tuple[str, int]], secret: bytes) -> None:
        self._driver: list[Address] = list(driver)
        self._secret = secret
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, str]] = deque()
        self._characters = 0
        self._lost = 0
        self._connected = False
        self._ending = not driver
        self._thread = threading.Thread(target=self._send, name="horovod-spark-output", daemon=True)

    def __enter__(self) -> CarriedOutput:
        if self._driver:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            connected = self._connected
        if connected:
            self._thread.join()

    def sink(self, stream: str) -> Sink:
        """Where the lines of ``stdout`` or ``stderr`` go."""
        return _StreamOfTask(self, stream)

    def write(self, stream: str, text: str) -> None:
        """Add text. Waits while much of it waits, if the driver takes it; the oldest is left out if the driver does not."""
        with self._changed:
            self._changed.wait_for(lambda: self._characters <= MOST_CHARACTERS or not self._connected)
            self._waiting.append((stream, text))
            self._characters += len(text)
            while self._characters > MOST_CHARACTERS and not self._connected and len(self._waiting) > 1:
                _, left_out = self._waiting.popleft()
                self._characters -= len(left_out)
                self._lost += len(left_out)
            self._changed.notify_all()

    def rest(self) -> list[tuple[str, str]]:
        """What the driver has not got, as streams and texts; after the context."""
        with self._changed:
            found = list(self._waiting)
            if self._lost:
                text = f"horovod.spark: {self._lost} characters of earlier output are left out: the driver cannot be reached\n"
                found.insert(0, ("stderr", text))
            return found

    def _send(self) -> None:
        try:
            with ExitStack() as stack:
                client = stack.enter_context(RendezvousClient(self._driver, self._secret, _CONNECT_SECONDS))
                with self._changed:
                    self._connected = not self._ending
                while self._connected and (part := self._next()):
                    stream, texts = part
                    client.put(KEY + stream, "".join(texts).encode("utf-8", "replace"), timeout=_SEND_SECONDS)
                    with self._changed:
                        for text in texts:
                            self._waiting.popleft()
                            self._characters -= len(text)
                        self._changed.notify_all()
        except (RendezvousError, OSError):
            pass  # what is left comes with the results
        finally:
            with self._changed:
                self._connected = False
                self._changed.notify_all()

    def _next(self) -> tuple[str, list[str]] | None:
        """Wait for text. Returns a stream and its next texts; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            if not self._waiting:
                return None
            stream = self._waiting[0][0]
            return stream, [text for _, text in takewhile(lambda each: each[0] == stream, self._waiting)]


class _StreamOfTask(Sink):
    def __init__(self, output: CarriedOutput, stream: str) -> None:
        super().__init__()
        self._output = output
        self._stream = stream

    def write(self, text: str) -> None:
        self._output.write(self._stream, text)
