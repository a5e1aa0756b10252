"""Picks the way in which a job's ranks are started. A new way is one sibling file and one line here."""

from __future__ import annotations

from collections.abc import Sequence

from horovod.runner.errors import UsageError
from horovod.runner.hosts import SlotInfo
from horovod.runner.machine import is_local
from horovod.runner.options import Options
from horovod.runner.strategies.base import Strategy
from horovod.runner.strategies.local import Local


def choose(options: Options, slots: Sequence[SlotInfo]) -> Strategy:
    """The strategy for a job.

    Raises:
        ValueError: the job asks for what does not exist yet, or a host has no address.
    """
    refuse_what_is_missing(options)
    for hostname in dict.fromkeys(slot.hostname for slot in slots):
        try:
            local = is_local(hostname)
        except OSError as error:
            raise UsageError(f"host {hostname} has no address: {error.strerror}. Is its name right?") from None
        if not local:
            raise UsageError(
                f"host {hostname} is not this machine, and several hosts are not supported yet; use -H localhost:<slots>"
            )
    return Local()


def refuse_what_is_missing(options: Options) -> None:
    """Refuse flags whose feature does not exist yet: a job must not run otherwise than it was asked to."""
    missing = {
        "--mpi": options.use_mpi,
        "--jsrun": options.use_jsrun,
        "--mpi-args": options.mpi_args is not None,
        "--binding-args": options.binding_args is not None,
    }
    elastic = {
        "--host-discovery-script": options.host_discovery_script is not None,
        "--min-np": options.min_num_proc is not None,
        "--max-np": options.max_num_proc is not None,
        "--slots-per-host": options.slots is not None,
        "--elastic-timeout": options.elastic_timeout is not None,
        "--reset-limit": options.reset_limit is not None,
        "--blacklist-cooldown-range": options.cooldown_range is not None,
    }
    for flag, asked in missing.items():
        if asked:
            raise UsageError(f"{flag} is not supported yet: this version starts ranks itself, on one host")
    for flag, asked in elastic.items():
        if asked:
            raise UsageError(f"{flag} is not supported yet: elastic jobs come in a later version")
