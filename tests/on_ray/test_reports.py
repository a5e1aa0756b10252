"""``ray.train.report`` in an elastic job: what is left out, and what is said of that."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from horovod.ray.train import reports


@pytest.mark.parametrize(
    ("ranks", "released", "said"),
    [
        ([3], [False], False),
        ([2], [], True),
        ([2, 3], [False], False),
        ([3, 3], [False, True], True),
        ([3, 2], [False], True),
    ],
    ids=["all", "fewer", "fewer, then all", "all, then released", "all, then fewer"],
)
def test_a_last_report_that_ray_has_not_got_is_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ranks: list[int],
    released: list[bool],
    said: bool,
) -> None:
    """Of three workers so many train at each report. Ray does not count a report that was released."""
    left = list(released)
    ray_context = SimpleNamespace(get_world_size=lambda: 3, report_call_index=0, get_synchronization_actor=lambda: None)

    def rays_own(_: object, metrics: dict[str, int]) -> None:
        ray_context.report_call_index += not left.pop(0)

    process = SimpleNamespace(round=1, call_when_over=lambda _: None)
    monkeypatch.setattr(reports.elastic_process, "this_process", lambda: process)
    monkeypatch.setattr(reports.context, "is_initialized", lambda: True)
    monkeypatch.setattr(reports, "get_train_context", lambda: ray_context)
    monkeypatch.setattr(reports.DistributedTrainFnUtils, "report", rays_own)
    of_worker = reports.ElasticReports()
    with caplog.at_level(logging.WARNING, "horovod.ray"):
        for size in ranks:
            generation = SimpleNamespace(identity=SimpleNamespace(size=size), stopped=None)
            monkeypatch.setattr(reports.context, "current", lambda generation=generation: generation)
            of_worker.report({"epoch": 1})
        of_worker.finish()
    assert not left, "those of all workers are Ray's"
    assert any("the last ray.train.report was skipped" in line for line in caplog.messages) == said
