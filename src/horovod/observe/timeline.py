"""The timeline: what happens to every tensor and when, as a file for chrome://tracing or Perfetto.

Rank 0 writes it. Each tensor has a row ("process"): ``NEGOTIATE_<OPERATION>``, with a mark when each rank was ready, then
``<OPERATION>`` with the engine's activity inside. Event names and nesting are those that existing tools read.

Worker threads append to a queue, and a separate thread writes (:mod:`horovod.observe.trace_file`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

from horovod.observe.trace_file import Event, TraceFile

_log = logging.getLogger("horovod.observe")

_NOTE = "recorded without the fast path: small collectives take longer than otherwise"
"""A note in every file about what recording changes."""

MOST_ROWS = 4096
"""How many names keep their rows. An idle name beyond that gets a new row when it comes again."""


class TensorLabel:
    """A tensor in the timeline: its name, data type and shape."""

    __slots__ = ("data_type", "name", "shape")

    def __init__(self, name: str, data_type: str, shape: Sequence[int]) -> None:
        self.name = name
        self.data_type = data_type
        self.shape = list(shape)


class Timeline:
    """One timeline file, from construction to :meth:`close`. Any thread may record.

    Args:
        path: the file. An existing file is replaced.
        mark_cycles: also mark every time the coordinator sends orders.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, mark_cycles: bool = False) -> None:
        self.path = path
        self._mark_cycles = mark_cycles
        self._file = TraceFile(path)
        self._start = time.monotonic_ns()
        self._rows: dict[str, int] = {}
        self._last_row = 0
        self._negotiating: dict[str, float] = {}  # since when
        self._ended: dict[str, float] = {}  # when the row's last operation was over
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()
        epoch = time.time_ns() // 1000
        self._file.write(
            [
                {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": epoch}},
                {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
                {"name": "process_labels", "ph": "M", "pid": 0, "args": {"labels": _NOTE}},
            ]
        )
        self._thread = threading.Thread(target=self._serve, name="horovod-timeline", daemon=True)
        self._thread.start()

    def ready(self, operation: str, tensors: Sequence[TensorLabel], rank: int, at: float | None = None) -> None:
        """Rank ``rank`` (of the process set) has submitted these tensors for ``operation``.

        Args:
            at: when, by ``time.monotonic``; None: now. The mark does not stand before the row's negotiation, which begins with
                the first rank that is heard of.
        """
        events: list[Event] = []
        now = self._now() if at is None else max(0.0, (at * 1e9 - self._start) / 1000)
        with self._lock:
            for tensor in tensors:
                row = self._row(tensor.name, events)
                last = self._negotiating.get(tensor.name)
                if last is None:
                    last = self._negotiating[tensor.name] = max(now, self._ended.get(tensor.name, 0.0))
                    events.append({"ph": "B", "name": f"NEGOTIATE_{operation}", "ts": last, "pid": row})
                events.append({"ph": "X", "name": str(rank), "ts": max(now, last), "dur": 0, "pid": row})
            self._events.put(events)

    def decided(self, tensors: Sequence[TensorLabel]) -> None:
        """All ranks have submitted these tensors."""
        now = self._now()
        with self._lock:
            events: list[Event] = []
            for tensor in tensors:
                if tensor.name in self._negotiating:  # else it was submitted before the timeline was started
                    del self._negotiating[tensor.name]
                    self._ended[tensor.name] = now
                    events.append({"ph": "E", "ts": now, "pid": self._row(tensor.name, events)})
            self._events.put(events)

    def begin(self, operation: str, activity: str, engine: str, tensors: Sequence[TensorLabel]) -> None:
        """``operation`` starts on these tensors, with the ``activity`` of ``engine``."""
        now = self._now()
        with self._lock:
            events: list[Event] = []
            for tensor in tensors:
                row = self._row(tensor.name, events)
                self._running.add(tensor.name)
                events.append({"ph": "B", "name": operation, "ts": now, "pid": row})
                events.append({"ph": "B", "name": activity, "ts": now, "pid": row, "args": {"engine": engine}})
            self._events.put(events)

    def end(self, tensors: Sequence[TensorLabel]) -> None:
        """The operation that began on these tensors is over."""
        now = self._now()
        with self._lock:
            events: list[Event] = []
            for tensor in tensors:
                row = self._row(tensor.name, events)
                self._running.discard(tensor.name)
                self._ended[tensor.name] = now
                events.append({"ph": "E", "ts": now, "pid": row})
                shown = {"dtype": tensor.data_type, "shape": str(tensor.shape)}
                events.append({"ph": "E", "ts": now, "pid": row, "args": shown})
            self._events.put(events)

    def cycle(self) -> None:
        """The coordinator sends orders."""
        if self._mark_cycles:
            self._events.put([{"ph": "i", "name": "CYCLE_START", "ts": self._now(), "s": "g", "pid": 0}])

    def close(self) -> None:
        """Write everything that was recorded, and end the thread."""
        self._events.put(None)
        self._thread.join()
        self._file.close()

    def _now(self) -> float:
        return (time.monotonic_ns() - self._start) / 1000

    def _row(self, name: str, events: list[Event]) -> int:
        row = self._rows.get(name)
        if row is None:
            if len(self._rows) >= MOST_ROWS:
                self._forget_a_row()
            self._last_row += 1
            row = self._rows[name] = self._last_row
            events.append({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
            events.append({"name": "process_sort_index", "ph": "M", "pid": row, "args": {"sort_index": row}})
        return row

    def _forget_a_row(self) -> None:
        """Forget the oldest row of a tensor without a running operation."""
        for name in self._rows:
            if name not in self._negotiating and name not in self._running:
                del self._rows[name]
                self._ended.pop(name, None)
                return

    def _serve(self) -> None:
        running = writable = True
        while running:
            batches = [self._events.get()]
            while not self._events.empty():
                batches.append(self._events.get())
            running = None not in batches
            if not writable:
                continue  # dropped, so that events do not fill the memory when the disk is full
            try:
                self._file.write([event for batch in batches if batch is not None for event in batch])
            except OSError as error:
                _log.error("the timeline %s cannot be written any more: %s", self.path, error)
                writable = False
