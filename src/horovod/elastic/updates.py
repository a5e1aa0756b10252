"""Changes of a job's hosts, as a rank hears of them."""

from __future__ import annotations

from typing import Protocol

from horovod.control.elastic_messages import HostUpdateResult

__all__ = ["HostUpdateResult", "HostUpdates"]


class HostUpdates(Protocol):
    """Where a rank learns that hosts were added or removed. The launcher implements it."""

    def poll(self) -> HostUpdateResult:
        """What has happened since the last call, combined; ``no_update`` if nothing.

        Called by the script's threads at each commit, so it neither blocks nor communicates; a thread of the
        implementation may add updates meanwhile. Rank 0's answer counts for the job. Once :meth:`Rounds.next
        <horovod.elastic.rounds.Rounds.next>` has returned, updates that the new round takes into account are not told again.
        """
