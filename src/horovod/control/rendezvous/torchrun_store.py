"""Looks up rank 0 of a torchrun job in the key-value store that torchrun's agents run, a ``TCPStore``.

The store does not authenticate its clients, so every process that can reach it can read it; torchrun's own ranks trust it in
the same way. Restarted workers find the same store with the keys of earlier rounds in it, and their nodes may count restarts
differently: after a failure only the node on which it happened counts one (``TORCHELASTIC_RESTART_COUNT``). So no count is part
of a key. The entry of a rank 0 that has died is not reachable, and the new rank 0 replaces it.

PyTorch is imported when a store is first used, because nothing else speaks the store's protocol. No other file of ``control``
imports it.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import msgspec

from horovod.control.mesh import own_addresses
from horovod.control.rendezvous.at_rank_0 import Directory, ServerEntry
from horovod.control.rendezvous.messages import RendezvousError

_PAUSE_SECONDS = (0.002, 0.1)
"""Seconds between two reads of the store, at first and at most. The store's own blocking wait would delay Ctrl-C, and its
client prints warnings when such a wait times out."""
_STALE_SECONDS = 1.0
"""How long a rank tries an entry whose server does not answer before it looks again."""
_decode = msgspec.msgpack.Decoder(ServerEntry).decode


class TorchrunStore(Directory):
    """The store of a torchrun job.

    Args:
        host, port: the store's address: ``MASTER_ADDR`` and ``MASTER_PORT``.
        run: torchrun's name for the job; several jobs may share a store.
        interface: offer only addresses of these network interfaces, separated by commas; "" for all.
    """

    def __init__(self, host: str, port: int, run: str, interface: str = "") -> None:
        self.port = 0
        self.address_text = f"the address in torchrun's store at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
        self.entry_timeout = _STALE_SECONDS
        self._host, self._port, self._interface = host, port, interface
        self._key = f"horovod/{run}/rank 0"
        self._count = f"{self._key} published"  # how often; PyTorch before 2.3 cannot ask whether a key is there
        self._connected: Any = None
        self._published = False

    def publish(self, port: int, key: bytes) -> None:
        addresses = own_addresses(self._interface) or ("127.0.0.1",)
        entry = ServerEntry([(address, port) for address in addresses], key)
        try:
            store = self._store(60.0)
            store.set(self._key, msgspec.msgpack.encode(entry))
            store.add(self._count, 1)
            self._published = True
        except RuntimeError as error:
            raise self._broken(error) from error

    def close(self) -> None:
        store, self._connected = self._connected, None
        if self._published:
            self._published = False
            try:
                store.set(self._key, b"")  # a reader must not find it deleted between two calls of the store's client
            except RuntimeError:
                pass  # torchrun is ending

    def look_up(self, deadline: float) -> ServerEntry | None:
        store = self._store(max(1.0, deadline - time.monotonic()))
        pause, longest = _PAUSE_SECONDS
        while time.monotonic() < deadline:
            try:
                found = store.get(self._key) if store.add(self._count, 0) else b""
                if found:
                    return _decode(found)
            except msgspec.DecodeError:
                raise RendezvousError(
                    f"the value of {self._key!r} in torchrun's store at {self._host}:{self._port} was not written by "
                    "this version of Horovod: install the same version for all ranks"
                ) from None
            except RuntimeError as error:
                raise self._broken(error) from error
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
        return None

    def _store(self, seconds: float) -> Any:
        if self._connected is None:
            try:
                from torch import distributed

                if not distributed.is_available():
                    raise ImportError("this PyTorch was built without torch.distributed")
            except ImportError as error:
                raise RendezvousError(
                    "torchrun's ranks on several hosts find each other in its store, which needs PyTorch in this Python: "
                    f"{error}. Install it (pip install torch), or start the job with horovodrun"
                ) from error
            try:
                limit = timedelta(seconds=seconds)
                self._connected = distributed.TCPStore(  # type: ignore[attr-defined]  # from a star import
                    self._host, self._port, is_master=False, timeout=limit, wait_for_workers=False
                )
            except RuntimeError as error:
                raise self._broken(error) from error
        return self._connected

    def _broken(self, error: RuntimeError) -> RendezvousError:
        said = str(error).splitlines()
        return RendezvousError(
            f"torchrun's store at {self._host}:{self._port} (MASTER_ADDR, MASTER_PORT), where the ranks look for rank 0, "
            f"cannot be used: {said[0] if said else type(error).__name__}. Does torchrun still run there, and can this host "
            "reach it?"
        )
