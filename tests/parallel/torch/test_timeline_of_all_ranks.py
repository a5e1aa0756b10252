"""One file shows what all ranks did: valid trace events by one clock, and the summary tells how much of it is hidden."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod.timeline.__main__ import main
from ranks import RankPool

STEPS = 12


def train(steps: int) -> None:
    import time

    import torch

    import horovod.torch as hvd
    from horovod.core.lifecycle.context import running

    hvd.init()
    if hvd.rank() == 0:
        assert running().observer.timeline is None  # so recording leaves the fast path on
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.barrier()  # rank 0 has begun the file, which has nothing that was before it
    for _ in range(steps):
        optimizer.zero_grad()
        if hvd.rank() == 1:
            time.sleep(0.05)  # more than the other ranks are late if other processes use their cores
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    hvd.allreduce(torch.ones(3), name="last")
    hvd.shutdown()


@pytest.fixture
def path(ranks: Callable[..., RankPool], tmp_path: Path) -> Path:
    found = tmp_path / "timeline.json"
    ranks(3, {"HOROVOD_TIMELINE": str(found), "HOROVOD_TIMELINE_ALL_RANKS": "1"}, "torch").run(train, STEPS)
    return found


def test_all_ranks_are_in_one_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = json.loads(path.read_text())
    by_rank: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(3)}
    for event in events:
        assert event["ph"] in {"M", "X", "i", "b", "e"}
        by_rank[event["pid"]].append(event)
    last = []
    for own in by_rank.values():
        collectives = [each for each in own if each.get("cat") == "collective"]
        assert sum(each["ph"] == "i" and each["name"] == "step" for each in own) == STEPS
        assert sum(each.get("cat") == "phase" and each["name"] == "backward" for each in own) == STEPS
        begun = {each["id"]: each["ts"] for each in own if each["ph"] == "b"}
        over = {each["id"]: each["ts"] for each in own if each["ph"] == "e"}
        assert begun.keys() == over.keys()
        assert all(begun[each] <= over[each] for each in begun)
        assert len(begun) == len(collectives)
        assert nested([each for each in own if each["ph"] == "X"])
        (final,) = [each for each in collectives if each["name"] == "allreduce.last"]
        assert final["args"]["bytes"] == 12
        assert final["args"]["line"].startswith(f"{__file__}:")
        last.append(final)
    assert len({each["args"]["order"] for each in last}) == 1
    # It ends on every rank after all have submitted it: by one clock that is so.
    assert max(each["args"]["submitted"] for each in last) <= min(each["ts"] + each["dur"] for each in last)
    assert main([str(path), "--html", str(path.with_suffix(".html"))]) == 0
    told = capsys.readouterr().out
    assert "While collectives were carried out, the ranks computed in " in told
    assert "Rank 1 holds up the others" in told
    assert [line.split()[:2] for line in told.splitlines()[-3:]] == [[str(rank), str(STEPS)] for rank in range(3)]
    assert "overlap" in path.with_suffix(".html").read_text()


def nested(events: list[dict[str, Any]]) -> bool:
    """Whether complete events of one row lie beside or inside one another, as viewers want it."""
    for row in {each["tid"] for each in events}:
        ends: list[float] = []
        of_row = sorted((each for each in events if each["tid"] == row), key=lambda each: (each["ts"], -each["dur"]))
        for each in of_row:
            begin, end = each["ts"], each["ts"] + each["dur"]
            while ends and ends[-1] <= begin + 0.002:
                ends.pop()
            if ends and end > ends[-1] + 0.002:
                return False
            ends.append(end)
    return True
