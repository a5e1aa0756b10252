"""The store of the process groups of an elastic job. The launcher keeps it, so it outlives every rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.store_requests import Add, Append, CompareSet, Count, Delete, Present, StoreRequest

_Store: Any = getattr(dist, "Store")  # noqa: B009  not in its stubs
_StoreError: Any = getattr(dist, "DistStoreError", RuntimeError)
_ASKING_SECONDS = 60.0


class LauncherStore(_Store):  # type: ignore[misc]  # C++, without types
    """A ``torch.distributed.Store`` in the launcher's rendezvous server. Threads and forked children may use it.

    Args:
        connect: connects to the server.
        prefix: returns the beginning of the keys there, which changes with the round.
    """

    def __init__(self, connect: Callable[[], RendezvousClient], prefix: Callable[[], str]) -> None:
        super().__init__()
        self._connect = connect
        self._prefix = prefix
        self._lock = threading.Lock()
        self._client: RendezvousClient | None = None
        self._process = os.getpid()

    def set(self, key: str, value: str | bytes) -> None:
        self._with_client(lambda client: client.put(self._prefix() + key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for a value, for the time limit of the store at most.

        Raises:
            DistStoreError: there is none by then.
        """
        if not self.check([key]):
            self.wait([key])
        return bytes(self._with_client(lambda client: client.get(self._prefix() + key, 0.0)))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(Add(self._prefix() + key, amount))[0])

    def check(self, keys: Sequence[str]) -> bool:
        wanted = [self._prefix() + key for key in keys]
        return len(self._ask(Present(wanted))) == len(wanted)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Raises:
            DistStoreError: some have none within ``timeout``, by default the time limit of the store.
        """
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + seconds
        with self._connect() as client:  # of its own: other threads use the store meanwhile
            for key in keys:
                try:
                    client.get(self._prefix() + key, max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    raise _StoreError(f"no rank has stored {key!r} within {seconds:g} seconds") from None

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._ask(CompareSet(self._prefix() + key, _bytes(expected), _bytes(desired)))[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Append(self._prefix() + key, _bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Delete(self._prefix() + key)))

    def num_keys(self) -> int:
        return int(self._ask(Count(self._prefix()))[0])

    def close(self) -> None:
        """Close the connection to the server. The next call opens another one."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    # The names by which C++ code calls them.
    deleteKey, getNumKeys = delete_key, num_keys

    def _ask(self, request: StoreRequest) -> list[bytes]:
        answer: list[bytes] = self._with_client(lambda client: client.change(request, _ASKING_SECONDS))
        return answer

    def _with_client(self, use: Callable[[RendezvousClient], Any]) -> Any:
        if (
            self._process != os.getpid()
        ):  # a forked child must not use its parent's connection, nor a lock that was held
            self._lock, self._client, self._process = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            try:
                return use(self._client)
            except BaseException as error:
                if not isinstance(error, TimeoutError):  # otherwise an answer may be under way that nobody awaits
                    self._client.close()
                    self._client = None
                raise


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
