"""Let other processes prepare the data: a compute job of tf.data workers beside a training job.

The compute job is ``horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker CONFIGFILE``; it writes the file by which
a training script finds it::

    config = TfDataServiceConfig.read("CONFIGFILE", wait_for_file_creation=True)
    dataset = dataset.repeat().batch(32).send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    ...
    if hvd.rank() == 0:
        config.compute_client().shutdown()  # ends the compute job

What comes before ``send_to_data_service`` runs in the compute job, what comes after it here. Data travel between the two jobs
by TensorFlow's own service (``tf.data.experimental.service``), which encrypts and authenticates nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from horovod.common import basics
from horovod.core.lifecycle import context
from horovod.core.submission.collectives import barrier
from horovod.runner.common.service.compute_service import Addresses, ComputeClient
from horovod.runner.common.util.timeout import TimeoutException

SIDES = ("compute", "training")
_POLL_SECONDS = 1.0

_shared: Counter[str] = Counter()
"""How many data sets a job has shared."""

_log = logging.getLogger("horovod.compute_service")


@dataclass(frozen=True)
class TfDataServiceConfig:
    """What a training job needs to know of a compute job, and its workers of each other. Contains a secret.

    Attributes:
        dispatchers: how many there are.
        workers_per_dispatcher: how many workers serve each.
        dispatcher_side: "compute": dispatchers run in the compute job. "training": in the training job.
        addresses: of the :class:`~horovod.runner.common.service.compute_service.ComputeService`, by network interface.
        key: its secret.
        timeout: seconds in which dispatchers and workers must have come.

    Raises:
        ValueError: another ``dispatcher_side``.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Addresses
    key: bytes = field(repr=False)
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ValueError(f"dispatcher_side={self.dispatcher_side!r}: expected one of {', '.join(map(repr, SIDES))}")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """A client of the compute job's service."""
        return ComputeClient(self.addresses, self.key, verbose)

    def to_dict(self) -> dict[str, Any]:
        """All of it in types that JSON knows; the key in hexadecimal figures."""
        return {
            "dispatchers": self.dispatchers,
            "workers_per_dispatcher": self.workers_per_dispatcher,
            "dispatcher_side": self.dispatcher_side,
            "addresses": {nic: [list(address) for address in entries] for nic, entries in self.addresses.items()},
            "key": self.key.hex(),
            "timeout": self.timeout,
        }

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> TfDataServiceConfig:
        """What :meth:`to_dict` made.

        Raises:
            ValueError: it is something else.
        """
        try:
            return TfDataServiceConfig(
                dispatchers=int(d["dispatchers"]),
                workers_per_dispatcher=int(d["workers_per_dispatcher"]),
                dispatcher_side=str(d["dispatcher_side"]),
                addresses={
                    str(nic): [(str(host), int(port)) for host, port in entries]
                    for nic, entries in d["addresses"].items()
                },
                key=bytes.fromhex(d["key"]),
                timeout=int(d.get("timeout", 60)),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no configuration of a compute service: {error!r}") from error

    def write(self, filename: str) -> None:
        """Write a JSON file that only this user can read. It is complete from the moment at which it is there."""
        path = Path(filename)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # others cannot read it
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(self.to_dict(), file)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False, timeout: float = 3600.0) -> TfDataServiceConfig:
        """Read what :meth:`write` wrote.

        Args:
            wait_for_file_creation: look every second until the file is there,
            timeout: for so many seconds.

        Raises:
            FileNotFoundError: there is no such file, and it is not waited for.
            TimeoutException: it did not come.
            ValueError: it is some other file.
        """
        path, deadline = Path(filename), time.monotonic() + timeout
        if wait_for_file_creation and not path.exists():
            _log.info("waiting for %s, which the compute job writes", path)
            while not path.exists():
                if time.monotonic() >= deadline:
                    raise TimeoutException(
                        f"{path}, which the compute job writes, did not come within {timeout:g} seconds"
                    )
                time.sleep(min(_POLL_SECONDS, timeout))
        try:
            return TfDataServiceConfig.from_dict(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of the dispatcher that serves a rank of the training job, ``grpc://host:port``, once its workers are there.

    Where dispatchers run on the training side, this starts one, on rank 0 if it is the only one and else on every rank, and
    stops it at the end of the block. Every rank of the training job enters the block, and leaves it when it has read its data.

    Args:
        compute_config: the compute job's.
        rank: of this process in the training job.

    Raises:
        ValueError: each rank would have to start a dispatcher, and there are fewer.
        TimeoutException: a dispatcher or its workers did not come within the configuration's timeout.
    """
    client, dispatchers = compute_config.compute_client(), compute_config.dispatchers
    training = compute_config.dispatcher_side == "training"
    if training and 1 < dispatchers <= rank:
        raise ValueError(
            f"rank {rank} has no dispatcher to start: the compute job has {dispatchers}. Start it with --dispatchers 1, or "
            "with one for each rank of the training job"
        )
    number = rank % dispatchers
    with ExitStack() as stack:
        if training and (rank == 0 or dispatchers > 1):
            stack.enter_context(_dispatcher(client, number))
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        yield address


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: Any = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """A data set whose elements are prepared by the compute job; also a method of ``tf.data.Dataset``.

    Args:
        dataset: what is to be prepared; the same on every rank. It must not call Python (``from_generator``, ``py_function``).
        compute_config: the compute job's, with dispatchers on the compute side.
        rank, size: of this process and of the training job; ``size`` is needed for ``round_robin``.
        processing_mode: "distributed_epoch": the workers share the elements. "parallel_epochs": each prepares all of them.
        reuse_dataset: the ranks of one dispatcher share what it prepares, first come, first served, so that an element goes to
            one of them; else each rank gets everything. Every rank must make the data sets that are shared in the same order.
        round_robin: with ``reuse_dataset``, the ranks get the elements in turn; the data set must have no end. A rank that
            stops reading holds up the others, so all keep their iterators until all have what they need.

    Raises:
        RuntimeError: dispatchers run on the training side; use :func:`tf_data_service` there.
        ValueError: ``round_robin`` without ``reuse_dataset`` or ``size``.
        TimeoutException: a dispatcher or its workers did not come within the configuration's timeout.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "the dispatcher runs on the training side, where something has to keep it for as long as data are read: use "
            "`with tf_data_service(compute_config, rank) as address:` and tf.data.experimental.service.distribute(service="
            "address, ...) inside; or start the compute job with --dispatcher-side compute"
        )
    if round_robin and not (reuse_dataset and size is not None):
        raise ValueError(
            "round_robin=True deals one data set to all ranks: it needs reuse_dataset=True and size=hvd.size()"
        )
    turn: dict[str, int] = {}
    if round_robin and size is not None:
        # Among the ranks that read from the same dispatcher, which knows of no others.
        number, dispatchers = rank % compute_config.dispatchers, compute_config.dispatchers
        turn = {"consumer_index": rank // dispatchers, "num_consumers": len(range(number, size, dispatchers))}
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name=_shared_name() if reuse_dataset else None,
                **turn,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def _shared_name() -> str:
    """What TensorFlow is to call the reading that the ranks of this job share; the same on all of them.

    It takes whatever has that name for the same data: a validation set of the name of the training set's would be empty, and so
    would all data of the next training job. So there is a name for each data set of each job.
    """
    if not basics.is_initialized():
        return "job"
    job = context.current()
    mark = hmac.digest(job.secret, b"tf.data %d" % job.generation, hashlib.sha256).hex()[:16]
    _shared[mark] += 1
    return f"job.{mark}.{_shared[mark]}"


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be one worker of the compute job, and its dispatcher where that is due, until a client says that it is over.

    Every rank of the compute job calls it, at once; rank r serves dispatcher ``r // workers_per_dispatcher``. It calls
    ``hvd.init()``, unless that was done.

    Raises:
        ValueError: the job has not ``dispatchers * workers_per_dispatcher`` ranks.
        TimeoutException: a dispatcher did not come within the configuration's timeout.
        ConnectionError: the compute service is gone.
    """
    own = not basics.is_initialized()
    basics.init()
    try:
        work(compute_config, lambda: None)
    finally:
        if own:
            basics.shutdown()


def work(config: TfDataServiceConfig, ended: Callable[[], None]) -> None:
    """Be a worker, in a job that is initialised; ``ended()`` is called when it serves no more data, for whatever reason."""
    rank, size, each = basics.rank(), basics.size(), config.workers_per_dispatcher
    if size != config.dispatchers * each:
        raise ValueError(
            f"the compute job has {size} ranks, but {config.dispatchers} dispatchers with {each} workers each need "
            f"{config.dispatchers * each}"
        )
    client, number = config.compute_client(), rank // each
    with ExitStack() as stack:
        if config.dispatcher_side == "compute" and rank % each == 0:
            stack.enter_context(_dispatcher(client, number))
        address = client.wait_for_dispatcher_registration(number, config.timeout)
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=address.partition("://")[2],
                worker_address=f"{client.own_address()}:%port%",
                dispatcher_timeout_ms=config.timeout * 1000,
            )
        )
        with _stopping(worker):
            try:
                client.register_worker_for_dispatcher(number, rank)
                client.wait_for_shutdown()
            finally:
                ended()  # before servers stop, which takes a while if a reader does not let go
        # A dispatcher outlives its workers, which else would look for it.
        barrier().wait()


@contextmanager
def _dispatcher(client: ComputeClient, number: int) -> Iterator[None]:
    """A dispatcher of this process, registered under the address by which others reach this host."""
    server = tf.data.experimental.service.DispatchServer()
    with _stopping(server):
        protocol, _, place = server.target.partition("://")
        client.register_dispatcher(number, f"{protocol}://{client.own_address()}:{place.rpartition(':')[2]}")
        yield


@contextmanager
def _stopping(server: Any) -> Iterator[None]:
    """Stop a server in the end. TensorFlow waits for its readers, for about a minute if one of them hangs."""
    try:
        yield
    finally:
        with suppress(tf.errors.OpError):  # it ends with its last reference in any case
            server.stop()
