"""The processes of this host, as the launcher's loop sees them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from horovod.runner.agent.base import Agent, HostFacts
from horovod.runner.agent.local import LocalAgent
from horovod.runner.agent.messages import Ended, Event, ProcessPlan
from horovod.runner.loop import Loop


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_processes_that_have_ended_leave_nothing_behind_while_the_job_goes_on() -> None:
    events: list[Event] = []

    def report(_: Agent, event: Event) -> None:
        events.append(event)

    loop = Loop()
    agent = LocalAgent(
        ["here"], loop, report, HostFacts("", 1, (), None), mark=b"_NO_SUCH_MARK=1", guardian=None, inherits_input=False
    )
    before = descriptors()
    agent.start(dict(os.environ), [ProcessPlan(number, ("sh", "-c", "exit 3"), {}) for number in range(5)])
    pids = [process.session for process in agent._processes.values()]
    loop.run(lambda: not agent._processes, time.monotonic() + 30)
    assert sorted(event.process for event in events if isinstance(event, Ended)) == list(range(5))
    assert descriptors() == before
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "not even a zombie"
    agent.end(0, hunt=False)
    loop.close()
