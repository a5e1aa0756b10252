"""``horovod.common.exceptions``: the errors users catch."""

from horovod.core.errors import (
    CollectiveTimeoutError,
    EngineFailureError,
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    MismatchError,
    RankLostError,
    RankRaisedError,
    get_version_mismatch_message,
)

__all__ = [
    "CollectiveTimeoutError",
    "EngineFailureError",
    "HorovodInternalError",
    "MismatchError",
    "RankLostError",
    "RankRaisedError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]
