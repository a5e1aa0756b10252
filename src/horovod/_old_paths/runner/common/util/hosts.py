"""``horovod.runner.common.util.hosts``: hosts, their slots and their ranks; an import path that scripts use."""

from horovod.runner.hosts.slots import (
    INVALID_SLOT_INFO,
    HostInfo,
    SlotInfo,
    get_host_assignments,
    parse_host_files,
    parse_hosts,
)

__all__ = ["INVALID_SLOT_INFO", "HostInfo", "SlotInfo", "get_host_assignments", "parse_host_files", "parse_hosts"]
