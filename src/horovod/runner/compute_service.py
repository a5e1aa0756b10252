"""The rendezvous of a compute job, which prepares data, and a training job, which uses the data.

The compute job has *workers*, each of which serves one *dispatcher*. The dispatchers belong to one of the two jobs. Both jobs
know the service's address and key, usually from a file. Dispatchers register their addresses, and workers register with their
dispatcher. Clients wait for these registrations. At the end one client calls ``shutdown``, and the service notifies all others.

The service is a rendezvous server (:mod:`horovod.control.rendezvous.server`) with a few agreed keys. It answers only clients
that have its secret, uses no pickles, and bounds every wait::

    dispatchers, workers_per_dispatcher     how many there are
    dispatcher/<id>                         the address of the dispatcher
    worker/<dispatcher id>/<index>          the id of a worker that serves it; each worker takes a free index
    shutdown                                set at the end
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from horovod.control.dial import Address, anywhere, dial_until
from horovod.control.mesh import own_addresses
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import PURPOSE, RendezvousError
from horovod.control.rendezvous.server import RendezvousServer
from horovod.runner.timeout import TimeoutException

Addresses = dict[str, list[tuple[str, int]]]
"""By network interface, the service's IPv4 addresses and port."""

CONNECT_SECONDS = 20.0
"""How long a client tries to reach the service, and waits for an answer that the service sends at once."""
_SHUTDOWN_POLL_SECONDS = 600.0
"""A client that waits for the shutdown asks again after this time, so that it notices a service that is gone."""
_DISPATCHERS, _WORKERS, _SHUTDOWN = "dispatchers", "workers_per_dispatcher", "shutdown"

_log = logging.getLogger("horovod.compute_service")


class ComputeService:
    """The service, from its construction to :meth:`shutdown`; also a context manager. Runs in a separate thread.

    Args:
        dispatchers: how many dispatchers there will be.
        workers_per_dispatcher: how many workers will serve each.
        key: the secret that clients must know, 32 bytes of :func:`horovod.control.secret.make_secret`.
        nics: the network interfaces through which clients may connect; default: all, and the loopback interface only if there
            is no other.

    Raises:
        ValueError: a number is below 1, or this host has no such interface.
    """

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, nics: Iterable[str] | None = None
    ) -> None:
        for name, value in ((_DISPATCHERS, dispatchers), (_WORKERS, workers_per_dispatcher)):
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1 is needed")
        found = _interfaces(nics)
        every = [address for addresses in found.values() for address in addresses]
        self._key = key
        # One socket: it listens at the only address, or at all addresses of this host.
        self._server = RendezvousServer(key, every[0] if len(every) == 1 else anywhere(every))
        self._server.put(_DISPATCHERS, str(dispatchers).encode())
        self._server.put(_WORKERS, str(workers_per_dispatcher).encode())
        self._server.start()
        _, port = self._server.address
        self._addresses = {nic: [(address, port) for address in addresses] for nic, addresses in found.items()}
        self._ended = False

    def addresses(self) -> Addresses:
        """The addresses at which clients reach the service."""
        return {nic: list(addresses) for nic, addresses in self._addresses.items()}

    def shutdown(self) -> None:
        """Notify all clients that wait, and end. Idempotent."""
        if self._ended:
            return
        self._ended = True
        try:
            # Through a client, since the server then answers all waiting clients before it stops.
            ComputeClient(self._addresses, self._key, verbose=0).shutdown()
        finally:
            self._server.stop()

    def __enter__(self) -> ComputeService:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class ComputeClient:
    """A client of a :class:`ComputeService`, for any process and thread; each call opens a connection.

    All calls raise ConnectionError if the service cannot be reached for 20 seconds, ends meanwhile, or has another key.

    Args:
        addresses: the addresses of the service, by network interface.
        key: the secret of the service.
        verbose: above 1, calls are logged (level INFO).
    """

    def __init__(self, addresses: Mapping[str, Sequence[tuple[str, int]]], key: bytes, verbose: int = 1) -> None:
        self._addresses = [(str(host), int(port)) for entries in addresses.values() for host, port in entries]
        self._key = key
        self._level = logging.INFO if verbose > 1 else logging.DEBUG
        self._reached: tuple[str, int] | None = None
        self._own = ""
        self._counts: tuple[int, int] | None = None

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register the address of a dispatcher. Registering the same address again changes nothing.

        Raises:
            IndexError: there is no dispatcher of that number.
            ValueError: the dispatcher is registered with another address.
        """
        self._check(dispatcher_id)
        with self._connected() as store:
            registered = _claim(store, f"dispatcher/{dispatcher_id}", dispatcher_address)
        if registered != dispatcher_address:
            raise ValueError(
                f"dispatcher {dispatcher_id} is registered at {registered} already, not at {dispatcher_address}: each "
                f"dispatcher of a compute job registers only once. Start a new compute job for each training job that runs "
                f"its own dispatchers"
            )
        _log.log(self._level, "dispatcher %d is at %s", dispatcher_id, dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Wait until a dispatcher has been registered. Returns its address.

        Raises:
            IndexError: there is no dispatcher of that number.
            TimeoutException: the dispatcher was not registered within ``timeout`` seconds.
        """
        self._check(dispatcher_id)
        try:
            with self._connected() as store:
                address = store.get(f"dispatcher/{dispatcher_id}", timeout).decode()
        except TimeoutError:
            raise TimeoutException(
                f"dispatcher {dispatcher_id} did not register within {timeout:g} seconds. If dispatchers run in the training "
                "job (--dispatcher-side training), that job must have started by then; otherwise look at the compute job's "
                "output. --timeout gives the dispatcher more time"
            ) from None
        _log.log(self._level, "dispatcher %d was found at %s", dispatcher_id, address)
        return address

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker with the dispatcher that it serves. Registering it again changes nothing.

        Raises:
            IndexError: there is no dispatcher, or no worker, of that number.
            ValueError: the dispatcher has all its workers.
        """
        self._check(dispatcher_id)
        dispatchers, workers = self._numbers()
        if not 0 <= worker_id < dispatchers * workers:
            raise IndexError(f"worker {worker_id} does not exist: their numbers are 0 to {dispatchers * workers - 1}")
        with self._connected() as store:
            for step in range(workers):  # each worker begins at another index, so that few are taken already
                index = (worker_id + step) % workers
                if _claim(store, f"worker/{dispatcher_id}/{index}", str(worker_id)) == str(worker_id):
                    break
            else:
                raise ValueError(
                    f"worker {worker_id} cannot serve dispatcher {dispatcher_id}, which has all its {workers} workers"
                )
        _log.log(self._level, "worker %d serves dispatcher %d", worker_id, dispatcher_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait until all workers of a dispatcher have been registered.

        Raises:
            IndexError: there is no dispatcher of that number.
            TimeoutException: not all were registered within ``timeout`` seconds.
        """
        self._check(dispatcher_id)
        workers = self._numbers()[1]
        deadline = time.monotonic() + timeout
        present = 0
        try:
            with self._connected() as store:
                for index in range(workers):
                    store.get(f"worker/{dispatcher_id}/{index}", max(0.0, deadline - time.monotonic()))
                    present += 1
        except TimeoutError:
            raise TimeoutException(
                f"dispatcher {dispatcher_id} did not have its {workers} workers within {timeout:g} seconds; look at the "
                "compute job's output. --timeout gives them more time"
            ) from None
        _log.log(self._level, "dispatcher %d has its %d workers", dispatcher_id, workers)

    def shutdown(self) -> None:
        """End the service: :meth:`wait_for_shutdown` returns in all clients. Idempotent."""
        with self._connected() as store:
            store.put(_SHUTDOWN, b"", timeout=CONNECT_SECONDS)
        _log.log(self._level, "the compute service was asked to end")

    def wait_for_shutdown(self) -> None:
        """Wait until a client has called ``shutdown``, or the service is gone (ConnectionError)."""
        with self._connected() as store:
            while True:
                try:
                    store.get(_SHUTDOWN, _SHUTDOWN_POLL_SECONDS)
                    break
                except TimeoutError:
                    pass  # it answered, so it lives
        _log.log(self._level, "the compute service is over")

    def own_address(self) -> str:
        """The address of this host by which it reaches the service, and so others of the two jobs reach it."""
        self._reach()
        return self._own

    def _check(self, dispatcher_id: int) -> None:
        dispatchers = self._numbers()[0]
        if not 0 <= dispatcher_id < dispatchers:
            raise IndexError(f"dispatcher {dispatcher_id} does not exist: their numbers are 0 to {dispatchers - 1}")

    def _numbers(self) -> tuple[int, int]:
        """How many dispatchers there are, and workers for each."""
        if self._counts is None:
            with self._connected() as store:
                found = [int(store.get(key, CONNECT_SECONDS)) for key in (_DISPATCHERS, _WORKERS)]
            self._counts = found[0], found[1]
        return self._counts

    def _reach(self) -> tuple[str, int]:
        """The first of the service's addresses that answers."""
        if self._reached is None:
            addresses: list[Address] = [*self._addresses]
            try:
                with dial_until(addresses, self._key, PURPOSE, time.monotonic() + CONNECT_SECONDS) as connection:
                    self._own = connection.socket.getsockname()[0]
                    self._reached = connection.socket.getpeername()[:2]
            except ConnectionError as error:
                raise self._unreachable(error) from error
        assert self._reached is not None
        return self._reached

    @contextmanager
    def _connected(self) -> Iterator[RendezvousClient]:
        try:
            with RendezvousClient(self._reach(), self._key, CONNECT_SECONDS) as store:
                yield store
        except RendezvousError as error:
            raise self._unreachable(error.__cause__ or error) from error

    def _unreachable(self, error: BaseException) -> ConnectionError:
        addresses = ", ".join(f"{host}:{port}" for host, port in self._addresses)
        return ConnectionError(
            f"the compute service at {addresses or 'no address'} cannot be reached, or has ended: {error}. Does the compute "
            "job still run, and is the configuration file from this run?"
        )


def _claim(store: RendezvousClient, key: str, value: str) -> str:
    """Set the value of a key unless it has one. Returns its value."""
    store.put(key, value.encode(), only_first=True, timeout=CONNECT_SECONDS)
    return store.get(key, CONNECT_SECONDS).decode()


def _interfaces(nics: Iterable[str] | None) -> dict[str, list[str]]:
    """This host's IPv4 addresses by interface."""
    if nics is not None:
        chosen = sorted({nics} if isinstance(nics, str) else set(nics))
        return {nic: list(own_addresses(nic)) for nic in chosen}
    every = own_addresses() or ("127.0.0.1",)
    found: dict[str, list[str]] = {}
    for nic in psutil.net_if_addrs():
        try:
            mine = [address for address in own_addresses(nic) if address in every]
        except ValueError:
            continue  # it has none
        if mine:
            found[nic] = mine
    return found
