"""The best settings that this process knows, in case the job continues with other ranks and this process becomes rank 0."""

from __future__ import annotations

from horovod.autotune.kept import Kept

known: Kept | None = None
"""Set on every rank when it carries out the coordinator's orders."""
