"""The present state of a running job, from the ranks' progress, for the live view and for metrics. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from horovod.observe.progress import PHASES, StepProgress

_RECENT = 3
"""How many reports of a rank make up its present rates."""


class RankView(msgspec.Struct, frozen=True):
    """One rank. Rates and shares are those of its last reports.

    Attributes:
        age: the seconds since its last report; -1 if it has sent none.
        phases: the share of the time in each of ``PHASES``.
        at: the line of the script that its main thread is at; "" if it is not known.
        awaits: the collectives that it waits for now.
    """

    rank: int
    host: str
    age: float
    steps: int
    steps_per_second: float
    samples_per_second: float
    bytes_per_second: float
    phases: list[float]
    communication: float
    waiting: float
    at: str
    awaits: list[str]


class JobSnapshot(msgspec.Struct, frozen=True):
    """A job.

    Attributes:
        seconds: the seconds since this generation began.
        recoveries: the number of earlier generations.
        straggler: the last message about a rank that delays the others; "" if there was none.
        ranks: all of them, in order.
        lost: the ranks that an elastic job has gone on without, as text; the latest.
    """

    size: int
    seconds: float
    recoveries: int
    straggler: str
    ranks: list[RankView]
    lost: list[str] = []


class _ReportedRank:
    """The reports of one rank."""

    def __init__(self) -> None:
        self.recent: deque[StepProgress] = deque(maxlen=_RECENT)
        self.came = 0.0
        self.steps = self.samples = self.bytes = self.collectives = 0
        self.phases = [0.0] * len(PHASES)
        self.communication = self.waiting = 0.0

    def add(self, progress: StepProgress, now: float) -> None:
        self.recent.append(progress)
        self.came = now
        self.steps += progress.steps
        self.samples += progress.samples
        self.bytes += progress.bytes
        self.collectives += progress.collectives
        self.communication += progress.communication
        self.waiting += progress.waiting
        self.phases = [one + two for one, two in zip(self.phases, progress.phases, strict=True)]


class LiveJob:
    """The state of one generation on rank 0. For one thread.

    Args:
        hosts: by rank.
        began: when, by ``time.monotonic``.
        recoveries: the number of earlier generations.
        lost: the ranks that the job has gone on without.
    """

    def __init__(self, hosts: Sequence[str], began: float, recoveries: int, lost: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._began = began
        self._recoveries = recoveries
        self._lost = list(lost)
        self._ranks = [_ReportedRank() for _ in hosts]
        self.straggler = ""

    def add(self, rank: int, progress: StepProgress, now: float) -> None:
        """Take a report of a rank."""
        self._ranks[rank].add(progress, now)

    def snapshot(self, now: float, lines: Mapping[int, str], awaited: Mapping[int, Sequence[str]]) -> JobSnapshot:
        """The present state of the job.

        Args:
            lines: by rank, the line of its main thread, if known.
            awaited: by rank, the collectives that it waits for.
        """
        return JobSnapshot(
            len(self._ranks),
            now - self._began,
            self._recoveries,
            self.straggler,
            [self._view(rank, now, lines.get(rank, ""), awaited.get(rank, ())) for rank in range(len(self._ranks))],
            self._lost,
        )

    def _view(self, rank: int, now: float, line: str, awaits: Sequence[str]) -> RankView:
        known = self._ranks[rank]
        recent = list(known.recent)
        seconds = sum(each.seconds for each in recent) or 1.0
        return RankView(
            rank,
            self._hosts[rank],
            now - known.came if recent else -1.0,
            known.steps,
            sum(each.steps for each in recent) / seconds,
            sum(each.samples for each in recent) / seconds,
            sum(each.bytes for each in recent) / seconds,
            [sum(each.phases[phase] for each in recent) / seconds for phase in range(len(PHASES))],
            sum(each.communication for each in recent) / seconds,
            sum(each.waiting for each in recent) / seconds,
            line,
            list(awaits),
        )

    def metrics(self, now: float) -> str:
        """The present state in Prometheus's text format."""
        ranks = list(enumerate(self._ranks))
        lines = [*_metric("horovod_ranks", "gauge", "Ranks of the job.", [("", len(ranks))])]
        lines += _metric(
            "horovod_recoveries_total", "counter", "Generations that ended before.", [("", self._recoveries)]
        )
        for name, help_text, values in (
            (
                "horovod_steps_total",
                "Steps of the optimizer, or recurrences of a name.",
                [each.steps for _, each in ranks],
            ),
            ("horovod_samples_total", "Samples that data loaders delivered.", [each.samples for _, each in ranks]),
            ("horovod_collectives_total", "Collectives that have ended.", [each.collectives for _, each in ranks]),
            ("horovod_bytes_total", "Bytes of their inputs.", [each.bytes for _, each in ranks]),
        ):
            lines += _metric(name, "counter", help_text, [(self._of(rank), values[rank]) for rank, _ in ranks])
        seconds = [
            (self._of(rank, phase), value)
            for rank, each in ranks
            for phase, value in (
                *zip(PHASES, each.phases, strict=True),
                ("communication", each.communication),
                ("waiting", each.waiting),
            )
        ]
        lines += _metric("horovod_phase_seconds_total", "counter", "Time of the ranks by phase.", seconds)
        ages = [(self._of(rank), now - each.came) for rank, each in ranks if each.recent]
        lines += _metric("horovod_report_age_seconds", "gauge", "Time since the rank's last report.", ages)
        return "\n".join(lines) + "\n"

    def _of(self, rank: int, phase: str = "") -> str:
        host = self._hosts[rank].replace("\\", "\\\\").replace('"', '\\"')
        more = f',phase="{phase}"' if phase else ""
        return f'{{rank="{rank}",host="{host}"{more}}}'


def _metric(name: str, kind: str, help_text: str, values: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield f"{name}{labels} {value:.6f}" if isinstance(value, float) else f"{name}{labels} {value}"
