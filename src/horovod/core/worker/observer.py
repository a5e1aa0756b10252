"""What observes the workers of one generation on this rank. Every worker gets it when it is made."""

from __future__ import annotations

from horovod.observe.flight_recorder import FlightRecorder, ReportTimer
from horovod.observe.timeline import Timeline


class Observer:
    """The observers of all workers.

    Attributes:
        timeline: shows what coordinators decide; None: there is none. Another thread may set it at any moment, so each use
            reads it once.
        reports: has a submission start a progress report when one is due.
    """

    __slots__ = ("reports", "timeline")

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self.reports = ReportTimer()

    def recorder(self, size: int) -> FlightRecorder | None:
        """A recorder of the last ``size`` collectives of one process set; None if it would keep none."""
        return FlightRecorder(size, self.reports) if size else None
