"""What rank 0 says of a running job."""

from __future__ import annotations

import re

from horovod.observe.live import LiveJob
from horovod.observe.progress import StepProgress


def progress(seconds: float, steps: int) -> StepProgress:
    part = seconds / 4
    return StepProgress(
        seconds, steps, 10 * steps, [part, part, 0.0, 0.0, 0.0], part, part, {0: part}, 2 * steps, 1000 * steps
    )


def test_rates_are_of_the_last_reports_and_sums_of_all() -> None:
    job = LiveJob(["a", "b"], 100.0, 2, ["rank 2 on c"])
    for number in range(5):
        job.add(1, progress(2.0, 4 if number < 2 else 8), 100.0 + number)
    job.straggler = "rank 1 holds"
    shown = job.snapshot(110.0, {1: "train.py:3"}, {1: ["x"]})
    assert shown.lost == ["rank 2 on c"]
    first, second = shown.ranks
    assert (shown.size, shown.seconds, shown.recoveries, shown.straggler) == (2, 10.0, 2, "rank 1 holds")
    assert (first.age, first.steps, first.at, first.awaits) == (-1.0, 0, "", [])
    assert (second.age, second.steps, second.at, second.awaits) == (6.0, 32, "train.py:3", ["x"])
    assert (second.steps_per_second, second.samples_per_second, second.bytes_per_second) == (4.0, 40.0, 4000.0)
    assert second.phases == [0.25, 0.25, 0.0, 0.0, 0.0]
    assert (second.communication, second.waiting) == (0.25, 0.25)


def test_metrics_are_prometheus_text() -> None:
    job = LiveJob(['odd"host'], 0.0, 0)
    job.add(0, progress(2.0, 5), 1.0)
    text = job.metrics(4.0)
    assert text.endswith("\n")
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{(\w+="([^"\\]|\\.)*",?)+\})? [0-9.e+-]+', line), line
    assert r'horovod_steps_total{rank="0",host="odd\"host"} 5' in text
    assert r'horovod_phase_seconds_total{rank="0",host="odd\"host",phase="waiting"} 0.500000' in text
    assert r'horovod_report_age_seconds{rank="0",host="odd\"host"} 3.000000' in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
