"""The ranks of a process group exchange data through the store that ``torch.distributed`` gives the group.

The first rank collects the values of all and publishes them together, so n ranks make O(n) requests of the store. It alone
waits for the others. If ranks are missing, it publishes their numbers, and every rank raises the same error.

A store may have been used before, by a group of the same name in the same or an earlier process. So each rank counts its starts
in the store; all ranks start a group equally often.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from horovod.control.rendezvous.interface import AllGather, Rendezvous
from horovod.control.rendezvous.messages import RendezvousError

_PAUSE_SECONDS = (0.0005, 0.05)
"""Between two looks into the store, at first and at last. The store's own blocking wait would hold up Ctrl-C."""
_PATIENCE_SECONDS = 10.0
"""How much longer the other ranks wait for the first, which has the same limit and tells them when it is over."""


class _Answer(msgspec.Struct, array_like=True):
    """The first rank's message: the values of all ranks, or the reason why there are none."""

    values: list[bytes] = []
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Answer).decode


class StoreExchange:
    """All-gathers among the ranks of one group.

    Args:
        store: of the group; a ``torch.distributed.Store``.
        rank, size: in the group.
        what: the call that the ranks make, for errors.
        purpose: calls for one purpose are counted together.
    """

    def __init__(self, store: Any, rank: int, size: int, what: str, purpose: str = "groups") -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._what = what
        self._purpose = purpose
        self._round = int(self._asked(lambda: store.add(f"horovod/{purpose}/{rank}", 1)))
        self._count = 0

    def all_gather(self, subject: str, value: bytes, seconds: float) -> list[bytes]:
        """Every rank gives a value for the same subject, and gets those of all, by rank.

        Raises:
            TimeoutError: ranks are missing after ``seconds``; the message names them.
            RendezvousError: the store cannot be used, or was not filled by this version of Horovod.
        """
        if self._size == 1:
            return [value]
        self._count += 1
        prefix = f"horovod/{self._purpose}/{self._round}.{self._count}/{subject}"
        deadline = time.monotonic() + seconds
        if self._rank:
            self._asked(lambda: self._store.set(f"{prefix}/{self._rank}", value))
            answer = self._answer(prefix, deadline + _PATIENCE_SECONDS, seconds)
        else:
            answer = self._collected(prefix, value, deadline, seconds)
            self._asked(lambda: self._store.set(f"{prefix}/all", _encode(answer)))
        if answer.error:
            raise TimeoutError(answer.error)
        return answer.values

    def end(self) -> None:
        """Every rank calls it after its last all-gather. The first waits for the others: it may run the store, and be about
        to end."""
        if self._size == 1:
            return
        key, deadline = f"horovod/{self._purpose}/{self._round}/left", time.monotonic() + _PATIENCE_SECONDS
        if self._rank:
            self._asked(lambda: self._store.add(key, 1))
            return
        pause, longest = _PAUSE_SECONDS
        while int(self._asked(lambda: self._store.add(key, 0))) < self._size - 1 and time.monotonic() < deadline:
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
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return (
            f"rank{'s' if len(missing) > 1 else ''} {shown} of {self._size} did not call {self._what} within {seconds:.3g} "
            "seconds. Look at the output there; if more time is all that is needed, give the call a longer timeout"
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
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def _has(self, key: str) -> bool:
        return bool(self._asked(lambda: self._store.check([key])))

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            said = str(error).splitlines()
            raise RendezvousError(
                f"the store of the process group cannot be used in {self._what}: {said[0] if said else type(error).__name__}. "
                "The process that runs it may have ended; look at the output of rank 0"
            ) from error


class StoreRendezvous(Rendezvous):
    """How the ranks of a job find each other that a process group starts.

    Args:
        exchange: among all ranks of the job.
        secret: the one that the user has given all ranks; empty if none. The store is trusted, as ``torch.distributed`` trusts
            it.
    """

    def __init__(self, exchange: StoreExchange, secret: bytes = b"") -> None:
        self.secret = secret
        self._exchange = exchange

    @contextmanager
    def session(
        self, calls: int, rank: int, size: int, seconds: float, members: Sequence[int] = ()
    ) -> Iterator[AllGather]:
        yield self._exchange.all_gather
