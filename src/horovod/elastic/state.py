"""The state that an elastic job keeps when its ranks change.

A state is saved at a commit, restored on the ranks that survive a failure, and synchronised among the ranks of each round.
Bindings derive states that know models and optimizers.
"""

from __future__ import annotations

import functools
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from horovod.core.errors import HostsUpdatedInterrupt
from horovod.core.lifecycle import context
from horovod.elastic.notification import notification_manager
from horovod.elastic.updates import Heard, hear


def _where_others_are(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    """``sync`` of a state, which in front of ``hvd.elastic.run`` only saves the state if no other rank takes part."""

    @functools.wraps(sync)
    def wrapper(self: State) -> None:
        guard = context.before_run()
        if guard is None:
            sync(self)
        elif guard.alone:
            self.save()
        else:
            with guard.unwarned():
                sync(self)

    return wrapper


class State(ABC):
    """The state of one rank, for ``hvd.elastic.run``.

    Args:
        bcast_object: ``bcast_object(obj)`` returns rank 0's object on every rank.
        get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self.checks = 0
        """How many checks, commits or :meth:`check_host_updates`, all ranks have made."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "sync" in cls.__dict__:
            cls.sync = _where_others_are(cls.__dict__["sync"])  # type: ignore[method-assign, assignment]

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions to call when a round begins, before the state is synchronised: they adapt what depends on the
        size.

        Ranks of earlier rounds call them, new ones do not. So a callback must not call collectives.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepare for a round that begins. ``hvd.elastic.run`` calls it on each rank of an earlier round, after ``init()``."""
        self._host_messages = queue.SimpleQueue()
        self._last_updated_timestamp = 0  # time stamps of the last round were of another rank's clock
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts were added or removed, so that the next check raises. Any thread may call it.

        Args:
            timestamp: later than that of the last update; an update that is not later is ignored.
            update_res: a :class:`~horovod.elastic.updates.HostUpdateResult`.
        """
        self._host_messages.put((timestamp, update_res))

    def on_interrupt(self) -> None:
        """Save the present state. ``hvd.elastic.run`` calls it when all ranks stop at a check because hosts change."""
        self.save()

    def commit(self) -> None:
        """Save the state, so that a failure loses only later work; then check for host updates. Every rank must call it.

        Raises:
            HostsUpdatedInterrupt: see :meth:`check_host_updates`.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Stop if hosts were added or removed. Every rank must call it. Rank 0's information decides for all ranks.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed. All ranks raise it; ``hvd.elastic.run`` catches it.
        """
        notification_manager.poll()
        updates = []
        while not self._host_messages.empty():
            updates.append(self._host_messages.get())
        heard = Heard(*self._bcast_object(tuple(hear(self._last_updated_timestamp, updates))))
        self._last_updated_timestamp = heard.latest
        self.checks += 1
        if heard.interrupts:
            raise HostsUpdatedInterrupt(skip_sync=heard.only_removed)

    @abstractmethod
    def save(self) -> None:
        """Save the present state in host memory. It communicates nothing."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the last save. It communicates nothing."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the same state. Every rank must call it.

        A process that joins a running job meets the others only in ``hvd.elastic.run``. If it calls this method before, the
        state is only saved.
        """

    def reset(self) -> None:  # noqa: B027  most states have nothing to do
        """Adapt to another number of ranks when a round begins. It communicates nothing."""


class ObjectState(State):
    """Python objects as attributes, for example ``ObjectState(bcast_object, get_rank, epoch=0)``.

    Saving keeps references: an attribute that is assigned is rolled back, an object that is changed in place is not.

    Args:
        bcast_object, get_rank: as for :class:`State`.
        kwargs: the attributes with their first values, which count as saved. Any values that can be pickled.

    Raises:
        ValueError: an attribute would hide a method of the state.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        for name in kwargs:
            if hasattr(type(self), name):
                raise ValueError(
                    f"{type(self).__name__}({name}=...): a state has a method of this name; choose another one"
                )
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        self._set_attributes()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        """Give all ranks the last save of rank 0. Later assignments are lost. Every rank must call it."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
