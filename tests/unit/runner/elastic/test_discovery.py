"""The host discovery script while an elastic job runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

import pytest

from horovod.runner.elastic import discovery
from horovod.runner.elastic.discovery import Discovery, Found, confirmed
from horovod.runner.event_loop import Loop
from horovod.runner.hosts.host_sources import HostScript
from horovod.runner.hosts.slots import HostInfo
from time_limits import SOON


@contextmanager
def following(
    script: HostScript, first: Sequence[HostInfo]
) -> Iterator[tuple[list[Found], Callable[[Callable[[], bool]], None]]]:
    """What the script has said that was new, and what waits until something is so."""
    found: list[Found] = []
    loop = Loop()

    def wait_until(done: Callable[[], bool]) -> None:
        def look() -> None:
            loop.after("look", 0.01, look)

        look()
        loop.run(done, time.monotonic() + SOON)
        assert done()

    try:
        with Discovery(script, 1, loop, found.append, first):
            yield found, wait_until
    finally:
        loop.close()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "PERIOD_SECONDS", 0.01)


def test_only_what_differs_is_told(tmp_path: Path) -> None:
    calls = quote(str(tmp_path / "calls"))
    script = HostScript(
        f"echo >> {calls}; case $(wc -l < {calls}) in 1|2) echo a:1;; 3) echo a:2;; *) echo none >&2; exit 3;; esac"
    )
    with following(script, [HostInfo("a", 1)]) as (found, wait_until):
        wait_until(lambda: len(found) >= 2)
    assert found[0] == [HostInfo("a", 2)]
    assert isinstance(found[1], str) and found[1].endswith("ended with exit status 3: none")
    assert len(found) == 2


def test_a_script_that_hangs_does_not_hold_up_the_end_of_the_job(tmp_path: Path) -> None:
    """Without an end of the script, the test would last as long as the script may take."""
    hangs = tmp_path / "hangs"
    with following(HostScript(f"touch {quote(str(hangs))}; sleep 1000", seconds=1000), []) as (found, wait_until):
        wait_until(hangs.exists)
    assert found == []


def test_a_host_that_is_away_for_one_answer_is_not_withdrawn(tmp_path: Path) -> None:
    calls = quote(str(tmp_path / "calls"))
    script = HostScript(
        f"echo >> {calls}; case $(wc -l < {calls}) in 2) echo a:1;; 4|5) echo b:2;; *) echo a:2; echo b:2;; esac"
    )
    both = [HostInfo("a", 2), HostInfo("b", 2)]
    with following(script, both) as (found, wait_until):
        wait_until(lambda: len(found) >= 2)
    assert found[0] == [HostInfo("b", 2)], "after the fifth answer"
    assert sorted(found[1], key=str) == both


def test_a_script_that_hangs_again_and_again_is_reported_once(tmp_path: Path) -> None:
    calls = quote(str(tmp_path / "calls"))
    command = f"echo >> {calls}; if [ $(wc -l < {calls}) -ge 4 ]; then echo b:1; else sleep 1000; fi"
    script = HostScript(command, seconds=0.3)
    with following(script, [HostInfo("a", 1)]) as (found, wait_until):
        wait_until(lambda: len(found) >= 2)
    assert found[0] == f"the host discovery script {command!r} did not end within 0.3 seconds"
    assert found[1] == [HostInfo("a", 1), HostInfo("b", 1)]


def test_a_host_missing_in_two_consecutive_answers_is_withdrawn() -> None:
    a, b = HostInfo("a", 2), HostInfo("b", 1)
    assert confirmed([a, b], [b]) == [a, b]
    assert confirmed([b], [b]) == [b]
    assert confirmed([a], [HostInfo("a", 1)]) == [a]
    assert confirmed([HostInfo("a", 1)], [HostInfo("a", 3, "user")]) == [HostInfo("a", 3, "user")]
