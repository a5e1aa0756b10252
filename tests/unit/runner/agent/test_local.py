"""The processes of this host, as the launcher's loop sees them."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod.runner.agent import local_agent as local
from horovod.runner.agent import process_tree
from horovod.runner.agent.agent_processes import StartedProcess
from horovod.runner.agent.base import Agent, HostFacts
from horovod.runner.agent.local_agent import LocalAgent
from horovod.runner.agent.messages import AgentEvent, Closed, Ended, OutputData, ProcessPlan
from horovod.runner.event_loop import Loop
from time_limits import SOON


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_processes_that_have_ended_leave_nothing_behind_while_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.1)
    events: list[AgentEvent] = []
    started: weakref.WeakSet[StartedProcess] = weakref.WeakSet()

    def start(*arguments: Any, **options: Any) -> StartedProcess:
        process = StartedProcess(*arguments, **options)
        started.add(process)
        return process

    monkeypatch.setattr(local, "StartedProcess", start)

    def report(_: Agent, event: AgentEvent) -> None:
        events.append(event)

    loop = Loop()
    agent = LocalAgent(
        ["here"], loop, report, HostFacts("", 1, (), None), mark=b"_NO_SUCH_MARK=1", guardian=None, inherits_input=False
    )
    before = descriptors()
    agent.start(dict(os.environ), [ProcessPlan(number, ("sh", "-c", "echo $$; exit 3"), {}) for number in range(5)])

    def ended() -> list[int]:
        return sorted(event.process for event in events if isinstance(event, Ended))

    loop.run(lambda: len(ended()) == 5 and descriptors() == before, time.monotonic() + SOON)
    assert ended() == list(range(5))
    assert descriptors() == before
    gc.collect()
    assert not started
    pids = [int(event.data) for event in events if isinstance(event, OutputData) and event.data]
    assert len(pids) == 5
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "not even a zombie"
    agent.end(0, hunt=False)
    loop.close()


def test_stubborn_processes_and_their_strays_share_one_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes have started outside their sessions gets no grace of its own once theirs is over."""
    events: list[AgentEvent] = []
    graces: list[float] = []
    end = process_tree.end

    def noted(find: Callable[[], set[int]], grace: float) -> set[int]:
        graces.append(grace)
        return end(find, grace)

    monkeypatch.setattr(process_tree, "end", noted)
    loop = Loop()
    agent = LocalAgent(
        ["here"],
        loop,
        lambda _, event: events.append(event),
        HostFacts("", 1, (), None),
        mark=b"_STRAYS_OF_A_TEST=1",
        guardian=None,
        inherits_input=False,
    )
    stubborn = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    plan = ProcessPlan(0, ("sh", "-c", f'setsid sh -c "{stubborn}" & {stubborn}'), {})
    agent.start({**os.environ, "_STRAYS_OF_A_TEST": "1"}, [plan])

    def ready() -> bool:
        return b"".join(event.data for event in events if isinstance(event, OutputData)).count(b"ready") == 2

    loop.run(ready, time.monotonic() + SOON)
    agent.end(0.2, hunt=True)
    loop.run(lambda: agent.closed, time.monotonic() + SOON)
    loop.close()
    assert graces == [0.0]
    assert [event.immortal for event in events if isinstance(event, Closed)] == [[]]
    assert process_tree.members((), b"_STRAYS_OF_A_TEST=1") == set()
