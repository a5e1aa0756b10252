"""``horovod.common.elastic``: what elastic training has in common in all bindings, under the path that scripts import."""

from horovod.core.errors import HorovodInternalError, HostsUpdatedInterrupt, NoNextRound
from horovod.elastic.loop import run_fn
from horovod.elastic.notification import notification_manager
from horovod.elastic.rounds import Reset, Rounds, connect, disconnect
from horovod.elastic.state import ObjectState, State
from horovod.elastic.updates import HostUpdateResult, HostUpdates

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostUpdates",
    "HostsUpdatedInterrupt",
    "NoNextRound",
    "ObjectState",
    "Reset",
    "Rounds",
    "State",
    "connect",
    "disconnect",
    "notification_manager",
    "run_fn",
]
