"""The loop around an elastic training function: synchronise, train, and after an interruption begin the next round."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.core.errors import HorovodInternalError, HostsUpdatedInterrupt, NoNextRound
from horovod.elastic import launched
from horovod.elastic.notification import notification_manager
from horovod.elastic.rounds import Reason, Reset
from horovod.elastic.state import State

_Result = TypeVar("_Result")

_log = logging.getLogger("horovod.elastic")


def run_fn(func: Callable[..., _Result], reset: Callable[[], object]) -> Callable[..., _Result]:
    """``func(state, ...)`` made to go on over failures and changes of the hosts. Every rank calls the result.

    Before ``func`` begins, and before it begins again, the state is synchronised. After a HorovodInternalError the state
    goes back to the last commit; after a HostsUpdatedInterrupt, which all ranks raise at the same check, it stays as it is.
    Then ``reset`` begins the next round. Any other exception ends the call.

    Args:
        func: its first argument is a :class:`~horovod.elastic.state.State`; it goes on from what the state says.
        reset: begins the next round: shuts the runtime down and initialises it. A
            :class:`~horovod.elastic.rounds.Reset` is also told why the last round ended.

    Returns:
        A function with the arguments of ``func``, which returns what ``func`` returns.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _Result:
        launched.connect()
        notification_manager.init()
        notification_manager.register_listener(state)
        reason: Reason | None = None
        skip_sync = False
        try:
            while True:
                try:
                    if reason is not None:
                        _begin_round(reset, reason)
                        state.on_reset()
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except NoNextRound:
                    raise
                except HorovodInternalError as error:
                    _log.warning("going back to the last commit: %s", error)
                    state.restore()
                    reason, skip_sync = error, False
                except HostsUpdatedInterrupt as interrupt:
                    state.on_interrupt()
                    reason, skip_sync = interrupt, interrupt.skip_sync
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _begin_round(reset: Callable[[], object], reason: Reason) -> None:
    if isinstance(reset, Reset):
        reset.after(reason)
    else:
        reset()
