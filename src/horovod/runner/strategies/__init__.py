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
    by_hand = "or call mpirun yourself, as in mpirun -np 2 python train.py"
    launchers = {
        "--mpi (controller: mpi)": (options.use_mpi, f"available is --gloo, the default; {by_hand}"),
        "--jsrun": (options.use_jsrun, "available is --gloo, the default"),
        "--mpi-args": (options.mpi_args is not None, f"leave it out, {by_hand}"),
        "--binding-args": (options.binding_args is not None, f"leave it out, {by_hand}"),
    }
    elastic = {
        "--host-discovery-script": (options.host_discovery_script is not None, "name the hosts with -H"),
        "--min-np": (options.min_num_proc is not None, "give the number of ranks with -np alone"),
        "--max-np": (options.max_num_proc is not None, "give the number of ranks with -np alone"),
        "--slots-per-host": (options.slots is not None, "give the slots with the hosts, as in -H localhost:4"),
        "--elastic-timeout": (options.elastic_timeout is not None, "use --start-timeout"),
        "--reset-limit": (options.reset_limit is not None, "leave it out"),
        "--blacklist-cooldown-range": (options.cooldown_range is not None, "leave it out"),
    }
    for flag, (asked, instead) in launchers.items():
        if asked:
            raise UsageError(
                f"{flag} is not supported: this version does not start ranks by mpirun or jsrun; {instead}"
            )
    for flag, (asked, instead) in elastic.items():
        if asked:
            raise UsageError(f"{flag} is not supported: this version has no elastic jobs; {instead}")
