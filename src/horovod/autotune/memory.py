"""The best settings that this process knows, for the case that the job goes on with other ranks, and this is rank 0 then."""

from __future__ import annotations

from horovod.autotune.kept import Kept

best: Kept | None = None
"""Set by what carries out the coordinator's orders, on every rank."""
