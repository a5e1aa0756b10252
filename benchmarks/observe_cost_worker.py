"""One rank of ``observe_cost.py``: trains the transformer in turns with what is to be measured on and off."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any

import torch
from workloads_torch import WORKLOADS

import horovod.torch as hvd
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.progress_reports import ProgressReports
from horovod.observe.flight_recorder import FlightRecorder
from horovod.observe.step_clock import FORWARD, StepClock, clock
from horovod.observe.timeline import Timeline
from horovod.observe.trace_file import TraceFile

STEPS = 2
"""How many steps of a turn count."""
STEPS_INSIDE = 25
"""How many steps are looked into."""
CALLS = 400
"""How many allreduces of 1 KB a turn has."""
LOOPS = 20_000
REPORT_SECONDS = 2.0
"""How often a rank reports (``core/lifecycle/progress_reports.py``)."""
DEFAULT, OFF, OFF_AGAIN, TIMELINE = "default", "off", "off again", "timeline"
MODES = {"one": (OFF, DEFAULT, TIMELINE, OFF_AGAIN), "all": (OFF, "all ranks")}


class Switch:
    """What this rank has on."""

    def __init__(self, folder: Path) -> None:
        self._worker = running().workers[0]
        self._recorder = self._worker.recorder
        self._enter = StepClock.enter
        self._file = str(folder / "timeline.json")

    @contextmanager
    def mode(self, name: str) -> Iterator[None]:
        """A block with this on, between steps: nothing is in flight."""
        off = name.startswith(OFF)
        self._worker._requests._recorder = self._worker.executor.recorder = None if off else self._recorder
        StepClock.enter = (lambda self, phase: FORWARD) if off else self._enter  # type: ignore[method-assign]  # measures
        if not off and name != DEFAULT:
            hvd.start_timeline(self._file)
        try:
            yield
        finally:
            if not off and name != DEFAULT:
                hvd.stop_timeline()
            self._worker._requests._recorder = self._worker.executor.recorder = self._recorder
            StepClock.enter = self._enter  # type: ignore[method-assign]  # measures


def main() -> None:
    which, seconds, answer = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    hvd.init()
    step = training()
    for _ in range(10):
        step()
    modes, switch = MODES[which], Switch(answer.parent)
    per_step = timed(step, 10)
    rounds = int(agreed(max(4.0, seconds / (len(modes) * (STEPS + 1) * per_step))))
    steps = in_turns(switch, modes, rounds, lambda: timed(step, STEPS, first=False))
    found: dict[str, Any] = {"ratios": {f"step, {name}": ratios_to_off(steps, name) for name in modes[1:]}}
    if which == "one":
        one = torch.ones(256)
        calls = in_turns(switch, (OFF, DEFAULT, TIMELINE, OFF_AGAIN), 40, lambda: timed(lambda: small(one), CALLS))
        found["ratios"] |= {f"1 KB allreduce, {name}": ratios_to_off(calls, name) for name in (DEFAULT, OFF_AGAIN)}
        found["direct"] = direct(step)
        found["direct"]["small"] = median(calls[TIMELINE]) - median(calls[DEFAULT])
        with switch.mode(TIMELINE):
            written = inside(step, (Timeline.ready, Timeline.decided, Timeline.begin, Timeline.end, TraceFile.write))
        found["direct"]["written"] = written
    else:
        with switch.mode("all ranks"):
            written = inside(step, (ProgressReports._send_now, ProgressReports.take))
        found["direct"] = {"written_of_all": written}
    if hvd.rank() == 0:
        answer.write_text(json.dumps(found))


def small(tensor: torch.Tensor) -> None:
    hvd.allreduce(tensor, name="small")


def training() -> Callable[[], None]:
    workload = WORKLOADS["transformer"]()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=workload.model.named_parameters())
    hvd.broadcast_parameters(workload.model.state_dict(), root_rank=0)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(workload.model).backward()
        optimizer.step()

    return step


def agreed(value: float) -> float:
    """Rank 0's."""
    return float(hvd.broadcast(torch.tensor(value, dtype=torch.float64), 0, name="agreed").item())


def timed(call: Callable[[], None], times: int, first: bool = True) -> float:
    """The median time of a call, after a first one that does not count, if there is to be one."""
    if first:
        call()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def in_turns(switch: Switch, modes: tuple[str, ...], rounds: int, turn: Callable[[], float]) -> dict[str, list[float]]:
    """The times of each mode's turns, by round."""
    times: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(rounds):
        first = number % len(modes)
        for name in [*modes[first:], *modes[:first]]:
            with switch.mode(name):
                times[name].append(turn())
    return times


def ratios_to_off(times: dict[str, list[float]], name: str) -> list[float]:
    """By round, the ratio of a mode's turn to that without anything."""
    return [one / other for one, other in zip(times[name], times[OFF], strict=True)]


def inside(step: Callable[[], None], functions: tuple[Any, ...]) -> float:
    """The processor time that methods take in a step, on whatever thread."""
    spent: list[float] = []

    def measured(function: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                spent.append(time.thread_time() - began)

        return call

    owners = [(getattr(sys.modules[each.__module__], each.__qualname__.split(".")[0]), each) for each in functions]
    for owner, each in owners:
        setattr(owner, each.__name__, measured(each))
    try:
        for _ in range(STEPS_INSIDE):
            step()
    finally:
        for owner, each in owners:
            setattr(owner, each.__name__, each)
    return sum(spent) / STEPS_INSIDE


def direct(step: Callable[[], None]) -> dict[str, float]:
    """What the parts take by themselves, and how often a step does them."""
    recorder = running().workers[0].recorder
    assert recorder is not None
    entered = 0
    enter = StepClock.enter

    def counted(self: StepClock, phase: int) -> int:
        nonlocal entered
        entered += 1
        return enter(self, phase)

    reported: list[float] = []
    send = ProgressReports._send_now

    def measured(self: ProgressReports, now: float) -> None:
        began = time.thread_time()
        send(self, now)
        reported.append(time.thread_time() - began)

    StepClock.enter, ProgressReports._send_now = counted, measured  # type: ignore[method-assign]  # measures
    before, steps, began = recorder.count, STEPS_INSIDE, time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - began) / steps
    StepClock.enter, ProgressReports._send_now = enter, send  # type: ignore[method-assign]  # measures
    return {
        "seconds_of_a_step": seconds,
        "collectives": (recorder.count - before) / steps,
        "phases": entered / steps,
        "append": of_append(),
        "life": of_life(),
        "phase": each(lambda: clock.enter(FORWARD)),
        "report": median(reported),
        "reports": seconds / REPORT_SECONDS,
    }


class Handle:
    record: Any = None


class Entry:
    def __init__(self) -> None:
        self.handle = Handle()


def of_append() -> float:
    """The seconds of one submission."""
    recorder, request = FlightRecorder(2000), last_request()
    now = time.monotonic()
    return each(lambda: recorder.submitted(request, now))


def of_life() -> float:
    """The seconds that a collective's whole life takes of the recorder, in batches of one."""
    recorder, request, entry = FlightRecorder(2000), last_request(), Entry()
    batch, handle, monotonic = [(None, entry)], entry.handle, time.monotonic

    def life() -> None:
        handle.record = recorder.submitted(request, 1.0)
        record = handle.record
        if record is not None:
            record.awaited = monotonic()
        recorder.begins(batch, "shm", 1.0)
        record = handle.record
        if record is not None:
            record.ended = monotonic()

    return each(life)


def last_request() -> Any:
    recorder = running().workers[0].recorder
    assert recorder is not None
    return recorder.ring[-1].request


def each(call: Callable[[], object]) -> float:
    """The seconds of one call, the best of several loops, without those of the loop and of an empty call."""
    return (min(repeat(call, number=LOOPS, repeat=15)) - min(repeat(lambda: None, number=LOOPS, repeat=15))) / LOOPS


if __name__ == "__main__":
    main()
