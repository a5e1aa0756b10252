"""The table of a running job."""

from __future__ import annotations

import pytest
from rich.console import Console

from horovod.observe.live import JobSnapshot, RankView
from horovod.top import __main__ as program
from horovod.top import query
from horovod.top.view import view


def rank(number: int, waiting: float, age: float = 0.5, at: str = "", awaits: tuple[str, ...] = ()) -> RankView:
    phases = [0.25, 0.25, 0.0, 0.0, 0.0]
    return RankView(number, "h", age, 40, 2.0, 64.0, 3e6, phases, 0.1, waiting, at, list(awaits))


def shown(snapshot: JobSnapshot, most: int = 64) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(view(snapshot, most))
    return capture.get()


def test_each_rank_has_its_rates_shares_and_what_it_does_now() -> None:
    ranks = [rank(0, 0.4, at="/x/train.py:7", awaits=("loss",)), rank(1, 0.0, 30.0, "/x/load.py:9"), rank(2, 0, -1.0)]
    text = shown(JobSnapshot(3, 3725.0, 1, "rank 1 is slow", ranks))
    lines = text.splitlines()
    assert lines[0].rstrip() == "3 ranks on 1 host | 1:02:05 | 2.00 steps/s | 192.0 samples/s | 1 recovery"
    titles = [
        "rank",
        "host",
        "steps",
        "steps/s",
        "samples/s",
        "MB/s",
        "data",
        "forward",
        "communication",
        "waiting",
        "now",
    ]
    assert lines[1].split() == titles
    assert lines[2].split() == [
        "0",
        "h",
        "40",
        "2.00",
        "64.0",
        "3.0",
        "25%",
        "25%",
        "10%",
        "40%",
        "waits",
        "for",
        "loss",
        "at",
        "train.py:7",
    ]
    assert lines[3].split() == ["1", "h", "40", "2.00", "64.0", "3.0", "25%", "25%", "10%", "0%", "at", "load.py:9"]
    assert lines[4].split() == ["2", "h", *"--------"]
    assert lines[5].rstrip() == "rank 1 is slow"


def test_the_ranks_that_were_lost_are_named() -> None:
    lost = ["in round 1 rank 2 on h (process 2, exit code 1)", "in round 3 rank 0 on h (process 0, exit code 1)"]
    lines = shown(JobSnapshot(1, 1.0, 2, "", [rank(0, 0.0)], lost)).splitlines()
    assert lines[-1].rstrip() == f"goes on without: {lost[0]}; {lost[1]}"


def test_of_many_ranks_those_are_shown_that_others_wait_for() -> None:
    text = shown(JobSnapshot(9, 1.0, 0, "", [rank(number, 0.9 - number / 10) for number in range(9)]), 3)
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["6", "7", "8"]
    assert "... and 6 ranks more, which wait longer" in text


@pytest.mark.parametrize(("target", "words"), [("x", "not 'x'"), ("4194999", "process or batch number 4194999 here")])
def test_a_job_that_is_not_there(target: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([target]) == 2
    assert words in capsys.readouterr().err


def test_without_a_number_there_must_be_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "listening", lambda: [5, 6])
    with pytest.raises(query.QueryError, match=r"several jobs run here.*: 5, 6"):
        query.rank_0_of(None)
    monkeypatch.setattr(query, "listening", lambda: [5])
    assert query.rank_0_of(None) == 5
