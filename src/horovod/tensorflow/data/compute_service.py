"""The compute service: a compute job of tf.data workers prepares the data of a training job.

``horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker CONFIGFILE`` starts the compute job, which writes its
configuration to a file. The training script reads it::

    config = TfDataServiceConfig.read("CONFIGFILE", wait_for_file_creation=True)
    dataset = dataset.repeat().batch(32).send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    ...
    if hvd.rank() == 0:
        config.compute_client().shutdown()  # ends the compute job

The transformations before ``send_to_data_service`` run in the compute job, those after it in the training job. TensorFlow's
data service (``tf.data.experimental.service``) sends the data. It does not encrypt or authenticate.

The compute job has dispatchers, each with the same number of workers. A dispatcher distributes the data that its workers
prepare. Rank r of the training job reads from dispatcher r % dispatchers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from horovod._base import whole_file
from horovod._base.signal_deferral import with_signals_deferred
from horovod.common import basics
from horovod.core.lifecycle import context
from horovod.core.submission.collectives import barrier
from horovod.runner.compute_service import Addresses, ComputeClient
from horovod.runner.timeout import TimeoutException

SIDES = ("compute", "training")
_POLL_SECONDS = 1.0

_shared: Counter[str] = Counter()
"""The number of shared data sets of each job, by the part of their names that identifies the job."""

_log = logging.getLogger("horovod.compute_service")


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The configuration of a compute job, by which its workers and training jobs connect to it. It contains a secret.

    Attributes:
        dispatchers: the number of dispatchers.
        workers_per_dispatcher: the number of workers of each dispatcher.
        dispatcher_side: the job whose processes run the dispatchers, "compute" or "training".
        addresses: the addresses of the :class:`~horovod.runner.compute_service.ComputeService`, by network
            interface.
        key: the secret of the service.
        timeout: how many seconds a process waits for dispatchers and workers to register.

    Raises:
        ValueError: ``dispatcher_side`` is something else.
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
        """A client of the compute service."""
        return ComputeClient(self.addresses, self.key, verbose)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as a dictionary of JSON types. The key is a hexadecimal string."""
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
        """The configuration from the result of :meth:`to_dict`.

        Raises:
            ValueError: ``d`` is something else.
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
            raise ValueError(f"this is not the configuration of a compute service: {error!r}") from error

    def write(self, filename: str) -> None:
        """Write a JSON file that only this user can read. A reader never sees an incomplete file."""
        whole_file.write(Path(filename), json.dumps(self.to_dict()).encode(), private=True)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False, timeout: float = 3600.0) -> TfDataServiceConfig:
        """Read a file that :meth:`write` has written.

        Args:
            filename: the path of the file.
            wait_for_file_creation: wait until the file exists.
            timeout: how many seconds to wait.

        Raises:
            FileNotFoundError: the file does not exist, and ``wait_for_file_creation`` is False.
            TimeoutException: the file did not exist in time.
            ValueError: the file contains something else.
        """
        path, deadline = Path(filename), time.monotonic() + timeout
        if wait_for_file_creation and not path.exists():
            _log.info("waiting for %s, which the compute job writes", path)
            while not path.exists():  # nothing announces a file on a shared file system
                if time.monotonic() >= deadline:
                    raise TimeoutException(
                        f"{path} does not exist after {timeout:g} seconds. The compute job writes it: check that one "
                        "is running, and that it was started with this path"
                    )
                time.sleep(min(_POLL_SECONDS, timeout))
        try:
            return TfDataServiceConfig.from_dict(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yields the address of this rank's dispatcher, ``grpc://host:port``, when all of its workers are registered.

    Every rank of the training job must enter the block, and leave it when it has read its data. If the dispatchers run on the
    training side, this starts one, which stops at the end of the block: on rank 0 if there is one dispatcher, and otherwise on
    every rank.

    Args:
        compute_config: the configuration of the compute job.
        rank: the rank of this process in the training job.

    Raises:
        ValueError: this rank has no dispatcher to start, because there are several but fewer than ranks.
        TimeoutException: the dispatcher or its workers did not register in time.
    """
    client, dispatchers = compute_config.compute_client(), compute_config.dispatchers
    training = compute_config.dispatcher_side == "training"
    if training and 1 < dispatchers <= rank:
        raise ValueError(
            f"rank {rank} has no dispatcher to start: the compute job was started with {dispatchers} dispatchers. Start it "
            "with --dispatchers 1, or with one dispatcher for each rank of the training job"
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
    """A data set whose elements the compute job prepares. This is also a method of ``tf.data.Dataset``.

    Args:
        dataset: the data set to prepare, the same on every rank. It must not call Python (``from_generator``,
            ``py_function``).
        compute_config: the configuration of the compute job. Its dispatchers must run on the compute side.
        rank, size: the rank of this process, and the size of the training job. ``size`` is needed for ``round_robin``.
        processing_mode: "distributed_epoch": the workers divide the elements. "parallel_epochs": each worker prepares all of
            them.
        reuse_dataset: the ranks of one dispatcher divide its elements: each element goes to the rank that asks first.
            Otherwise each rank gets all elements. Every rank must create the shared data sets in the same order.
        round_robin: with ``reuse_dataset``, the ranks get the elements in turn. The data set must be infinite. A rank that
            stops reading blocks the others, so keep the iterators on all ranks until all have read what they need.

    Raises:
        RuntimeError: the dispatchers run on the training side. Use :func:`tf_data_service` then.
        ValueError: ``round_robin`` without ``reuse_dataset`` or ``size``.
        TimeoutException: the dispatcher or its workers did not register in time.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "the dispatchers of this compute job run in the training job: use `with tf_data_service(compute_config, rank) as "
            "address:`, and read the data within it, through tf.data.experimental.service.distribute(service=address, ...); or "
            "start the compute job with --dispatcher-side compute"
        )
    if round_robin and not (reuse_dataset and size is not None):
        raise ValueError(
            "round_robin=True gives the elements of one data set to the ranks in turn: it needs reuse_dataset=True and "
            "size=hvd.size()"
        )
    turn: dict[str, int] = {}
    if round_robin and size is not None:
        # The dispatcher counts only the ranks that read from it.
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
    """A name for TensorFlow's job that reads one shared data set. It is the same on all ranks of this training job.

    All readers of one name share the elements of one data set. If a validation set, or a data set of the next training job, had
    the name of a training set that was read before, it would be empty. So each data set of each job has its own name.
    """
    if not basics.is_initialized():
        return "job"
    job = context.current()
    mark = hmac.digest(job.secret, b"tf.data %d" % job.generation, hashlib.sha256).hex()[:16]
    _shared[mark] += 1
    return f"job.{mark}.{_shared[mark]}"


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run one worker of the compute job, and on some ranks a dispatcher, until a client calls ``shutdown()``.

    Every rank of the compute job must call it. Rank r is a worker of dispatcher ``r // workers_per_dispatcher``. It calls
    ``hvd.init()``, unless the script has done so.

    Raises:
        ValueError: the job does not have ``dispatchers * workers_per_dispatcher`` ranks.
        TimeoutException: a dispatcher did not register in time.
        ConnectionError: the compute service cannot be reached any more.
    """
    own = not basics.is_initialized()
    basics.init()
    try:
        run_worker(compute_config, lambda: None)
    finally:
        if own:
            basics.shutdown()


def run_worker(config: TfDataServiceConfig, ended: Callable[[], None]) -> None:
    """Run a worker in a job that is initialised. Calls ``ended()``, once or twice, before its servers stop for any reason."""
    rank, size, each = basics.rank(), basics.size(), config.workers_per_dispatcher
    if size != config.dispatchers * each:
        raise ValueError(
            f"the compute job has {size} ranks, but {config.dispatchers} dispatchers with {each} workers each need "
            f"{config.dispatchers * each} ranks"
        )
    client, number = config.compute_client(), rank // each
    with ExitStack() as stack:
        if config.dispatcher_side == "compute" and rank % each == 0:
            stack.enter_context(_dispatcher(client, number, ended))
        address = client.wait_for_dispatcher_registration(number, config.timeout)
        settings = tf.data.experimental.service.WorkerConfig(
            dispatcher_address=address.partition("://")[2],
            worker_address=f"{client.own_address()}:%port%",
            dispatcher_timeout_ms=config.timeout * 1000,
        )
        with _running(lambda: tf.data.experimental.service.WorkerServer(settings), ended):
            client.register_worker_for_dispatcher(number, rank)
            client.wait_for_shutdown()
        # A dispatcher must stop after its workers, because workers try to reconnect to it.
        barrier().wait()


@contextmanager
def _dispatcher(client: ComputeClient, number: int, ended: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A block with a dispatcher in this process, registered with the address at which other hosts reach this host."""
    with _running(tf.data.experimental.service.DispatchServer, ended) as server:
        protocol, _, address = server.target.partition("://")
        client.register_dispatcher(number, f"{protocol}://{client.own_address()}:{address.rpartition(':')[2]}")
        yield


@contextmanager
def _running(start: Callable[[], Any], ended: Callable[[], None]) -> Iterator[Any]:
    """A context with the server that ``start()`` returns. At its end, always calls ``ended()`` and then stops the server.

    TensorFlow waits for readers, up to about a minute if one hangs. A process that was asked to end may be killed meanwhile.
    """
    servers: list[Any] = []
    try:
        # TensorFlow crashes when a server is dropped before it has started, as by the exception of a signal handler.
        with_signals_deferred(lambda: servers.append(start()))
        yield servers[0]
    finally:
        ended()
        for server in servers:
            with suppress(tf.errors.OpError):  # the server ends in any case when its last reference is dropped
                server.stop()
