"""Refuses flags of features that do not exist yet, so that no job runs otherwise than its user asked."""

from __future__ import annotations

from horovod.runner.errors import UsageError
from horovod.runner.options import Options


def refuse_what_is_missing(options: Options) -> None:
    """Refuse a request that needs such a feature.

    Raises:
        ValueError: a flag has been given whose feature does not exist.
    """
    elastic = {
        "--host-discovery-script": (options.host_discovery_script is not None, "name the hosts with -H"),
        "--min-np": (options.min_num_proc is not None, "give the number of ranks with -np alone"),
        "--max-np": (options.max_num_proc is not None, "give the number of ranks with -np alone"),
        "--slots-per-host": (options.slots is not None, "give the slots with the hosts, as in -H localhost:4"),
        "--elastic-timeout": (options.elastic_timeout is not None, "use --start-timeout"),
        "--reset-limit": (options.reset_limit is not None, "leave it out"),
        "--blacklist-cooldown-range": (options.cooldown_range is not None, "leave it out"),
    }
    for flag, (asked, instead) in elastic.items():
        if asked:
            raise UsageError(f"{flag} is not supported: this version has no elastic jobs; {instead}")
