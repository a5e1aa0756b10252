"""How long a coordinator takes a request to have waited, in random histories of a job that is stopped as a whole."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod._base.config import Config
from horovod._base.running_time import LATE_SECONDS, TURN_SECONDS, RunningTime
from horovod.core.negotiation.negotiator import Negotiator
from horovod.core.worker import stall_reporter
from unit.core.workers import Watch, allreduce_request

MEMBERS = 3
A_TURN = TURN_SECONDS + LATE_SECONDS
STOP = st.one_of(st.just(0.0), st.floats(4 * TURN_SECONDS, 1000))


class Message(NamedTuple):
    """An announcement, and how long the process is stopped before it is handled, and after it."""

    member: int
    name: str
    before: float
    after: float


MESSAGES = st.builds(Message, st.integers(0, MEMBERS - 1), st.sampled_from("abc"), STOP, STOP)
TURNS = st.lists(st.tuples(st.lists(MESSAGES, max_size=4), st.floats(0, 1), STOP), min_size=1, max_size=12)
"""Of each turn: the messages that are handled, the part of the planned sleep after which it ends, and a stop in it."""


@given(TURNS)
def test_a_request_has_waited_as_long_as_the_process_ran(turns: list[tuple[list[Message], float, float]]) -> None:
    """A stop is seen by what comes late. So up to a turn of each stop may count."""
    now, ran, unseen = 0.0, 0.0, 0.0
    began: dict[str, tuple[float, float]] = {}  # of each incomplete name: the time, and how long the process had run
    announced: dict[str, set[int]] = {}
    negotiator, clock = Negotiator(range(MEMBERS), 1024), RunningTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stall_reporter, "running_time", clock)
        patch.setattr(stall_reporter, "time", SimpleNamespace(monotonic=lambda: now))
        patch.setattr(stall_reporter, "why_not_running", lambda pid: None)
        config = Config(stall_warning_time=timedelta(seconds=60), stall_shutdown_time=timedelta(0))
        reporter = stall_reporter.StallReporter(range(MEMBERS), negotiator, config, Watch())
        for messages, part, stop in turns:
            for member, name, before, after in messages:
                if member in announced.get(name, ()):
                    continue
                unseen += A_TURN * ((before > 0) + (after > 0))
                now += before
                negotiator.announce(member, [allreduce_request(name)], now)
                began.setdefault(name, (now, ran))
                announced.setdefault(name, set()).add(member)
                now += after
                if len(announced[name]) == MEMBERS:
                    negotiator.take()
                    del announced[name], began[name]
            milliseconds = reporter.milliseconds()
            for since, ran_before in began.values():
                waited, tolerance = clock.age(since, now), 1e-6 * max(1.0, now)
                assert ran - ran_before - tolerance <= waited <= ran - ran_before + unseen + tolerance
            sleep = part * (TURN_SECONDS if milliseconds is None else milliseconds / 1000)
            unseen += A_TURN * (stop > 0)
            now, ran = now + sleep + stop, ran + sleep
