"""Exchanges data among the ranks of a process group through the store that ``torch.distributed`` gives the group.

Rank 0 of the group collects the values of all ranks and publishes them together, so n ranks make O(n) requests to the store. If
ranks are missing, rank 0 publishes their numbers, and every rank raises the same error.

A group of the same name, in this or an earlier process, may have used the store before. So each rank counts in the store how
often it has started the group, and the keys contain that number. All ranks start a group equally often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec

from horovod.control.rendezvous.messages import RendezvousError
from horovod.control.rendezvous.rendezvous_kinds import AllGather, Rendezvous
from horovod.core.errors import HorovodInternalError

_PAUSE_SECONDS = (0.0005, 0.05)
"""The first and the longest pause between two checks of the store. The store's own blocking wait would delay Ctrl-C."""
_PATIENCE_SECONDS = 10.0
"""How much longer than the time limit the other ranks wait for rank 0, which has the same limit and publishes who is missing.
At most as long as that limit. Also how long rank 0 waits in :meth:`StoreExchange.end`."""


def has_key(store: Any, key: str) -> bool:
    """Whether a ``torch.distributed.Store`` has a value for a key.

    PyTorch 2.1 has no ``Store.check`` in Python. There it waits for the key as briefly as the store can: for some
    milliseconds, or a second if it is a ``FileStore``.

    Raises:
        RuntimeError: the store cannot be used.
    """
    if hasattr(store, "check"):
        return bool(store.check([key]))
    try:
        store.wait([key], timedelta(milliseconds=1))
    except RuntimeError:  # the key is missing, or the store cannot be used, in which case it raises again
        store.add("horovod/asked", 0)
        return False
    return True


class _Answer(msgspec.Struct, array_like=True):
    """Rank 0's message: the values of all ranks, or an error."""

    values: list[bytes] = []
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Answer).decode


class StoreExchange:
    """All-gathers among the ranks of one group. Every rank must make one.

    Args:
        store: the group's ``torch.distributed.Store``.
        rank, size: this rank's number in the group, and the number of ranks.
        what: the call that the ranks make, for error messages.
        purpose: part of the keys; exchanges for the same purpose share a counter.
        check: called while this rank waits; may raise an error that ends the wait, such as that of a failed job.
        names: by rank, what else errors say of a missing rank; empty: nothing.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        what: str,
        purpose: str = "groups",
        check: Callable[[], None] = lambda: None,
        names: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._what = what
        self._purpose = purpose
        self._check = check
        self._names = names
        self._round = int(self._asked(lambda: store.add(f"horovod/{purpose}/{rank}", 1)))
        self._count = 0

    def all_gather(self, subject: str, value: bytes, seconds: float) -> list[bytes]:
        """Gather the values of all ranks, by rank. Every rank must call it with the same subject.

        Raises:
            TimeoutError: ranks are missing after ``seconds``; the message names them (the first 16).
            RendezvousError: the store cannot be used, or rank 0 runs another version of Horovod.
        """
        if self._size == 1:
            return [value]
        self._count += 1
        prefix = f"horovod/{self._purpose}/{self._round}.{self._count}/{subject}"
        deadline = time.monotonic() + seconds
        if self._rank:
            self._asked(lambda: self._store.set(f"{prefix}/{self._rank}", value))
            answer = self._answer(prefix, deadline + min(_PATIENCE_SECONDS, seconds), seconds)
        else:
            answer = self._collected(prefix, value, deadline, seconds)
            self._asked(lambda: self._store.set(f"{prefix}/all", _encode(answer)))
        if answer.error:
            raise TimeoutError(answer.error)
        return answer.values

    def end(self) -> None:
        """End the exchange. Every rank must call it after its last all-gather.

        Rank 0 waits up to 10 seconds for the others, because the store may run in its process, which may end next.
        """
        if self._size == 1:
            return
        key, deadline = f"horovod/{self._purpose}/{self._round}/left", time.monotonic() + _PATIENCE_SECONDS
        if self._rank:
            self._asked(lambda: self._store.add(key, 1))
            return
        pause, longest = _PAUSE_SECONDS
        while int(self._asked(lambda: self._store.add(key, 0))) < self._size - 1 and time.monotonic() < deadline:
            try:
                self._check()
            except HorovodInternalError:
                return  # a rank that is done may have left already; one that is lost needs nothing any more
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def _collected(self, prefix: str, value: bytes, deadline: float, seconds: float) -> _Answer:
        keys = [f"{prefix}/{rank}" for rank in range(1, self._size)]
        self._wait(keys, deadline)
        missing = [rank for rank, key in enumerate(keys, 1) if not self._has(key)]
        if not missing:
            return _Answer([value, *(self._asked(lambda key=key: self._store.get(key)) for key in keys)])
        return _Answer(error=self._lateness(missing, seconds))

    def _answer(self, prefix: str, deadline: float, seconds: float) -> _Answer:
        key = f"{prefix}/all"
        if not self._wait([key], deadline):
            return _Answer(error=self._lateness([0], seconds))
        try:
            return _decode(self._asked(lambda: self._store.get(key)))
        except msgspec.DecodeError:
            raise RendezvousError(
                f"rank 0 wrote an entry for {self._what} into the store that this version of Horovod cannot read: install "
                "the same version for all ranks"
            ) from None

    def _lateness(self, missing: Sequence[int], seconds: float) -> str:
        listed = [f"{rank} ({self._names[rank]})" if self._names else str(rank) for rank in missing[:16]]
        shown = ", ".join(listed) + (", ..." if len(missing) > 16 else "")
        return (
            f"rank{'s' if len(missing) > 1 else ''} {shown} of {self._size} did not call {self._what} within {seconds:.3g} "
            "seconds. See the output of the missing ranks; if they only need more time, pass a longer timeout to the call"
        )

    def _wait(self, keys: Sequence[str], deadline: float) -> bool:
        """Wait until all keys are in the store; False if they are not by the deadline."""
        pause, longest = _PAUSE_SECONDS
        remaining = list(keys)
        while True:
            while remaining and self._has(remaining[-1]):
                remaining.pop()
            if not remaining:
                return True
            if time.monotonic() >= deadline:
                return False
            self._check()
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def _has(self, key: str) -> bool:
        return bool(self._asked(lambda: has_key(self._store, key)))

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            said = str(error).splitlines()
            raise RendezvousError(
                f"the store of the process group cannot be used in {self._what}: {said[0] if said else type(error).__name__}. "
                "The process that runs it may have ended; see the output of rank 0"
            ) from error


class StoreRendezvous(Rendezvous):
    """The rendezvous of a runtime that a process group starts.

    Args:
        exchange: the exchange among all ranks of the job.
        secret: the secret that the user has given all ranks; empty if none: rank 0 then sends one through the store, which is
            trusted, as ``torch.distributed`` trusts it.
    """

    def __init__(self, exchange: StoreExchange, secret: bytes = b"") -> None:
        self.secret = secret
        self._exchange = exchange

    @contextmanager
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> Iterator[AllGather]:
        yield self._exchange.all_gather
