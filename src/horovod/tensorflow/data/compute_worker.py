"""The program of a compute job: ``horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker CONFIGFILE``.

Rank 0 runs the compute service and writes the file with its address for training jobs. Every rank is a tf.data worker. The job
ends when a training script calls ``config.compute_client().shutdown()``, or when it is interrupted. It then removes the file.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from horovod._base import config as settings
from horovod.common import basics
from horovod.control.secret import make_secret
from horovod.core.submission.collectives import barrier
from horovod.runner.compute_service import ComputeService
from horovod.tensorflow.data.compute_service import SIDES, TfDataServiceConfig, run_worker
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.lifecycle import init, shutdown


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _leave)  # horovodrun ends a rank with this signal; the file must be removed
    init()
    try:
        with _compute_service(options) as config:
            every = broadcast_object(config, root_rank=0, name="compute service")
            run_worker(every, lambda: _remove(options.configfile, config))
            barrier().wait()  # the service stops when no rank needs it any more
    finally:
        shutdown()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m horovod.tensorflow.data.compute_worker",
        description="One rank of a compute job, which prepares data for training jobs. Start it with horovodrun.",
    )
    parser.add_argument("configfile", help="the file to write, which training jobs read; it contains a secret")
    parser.add_argument(
        "--dispatchers",
        type=int,
        default=1,
        help="the number of dispatchers, a divisor of the number of ranks (default: 1)",
    )
    parser.add_argument(
        "--dispatcher-side",
        choices=SIDES,
        default="compute",
        help="the job whose processes run the dispatchers (default: compute)",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=60,
        metavar="SECONDS",
        help="how long to wait until dispatchers and workers are registered (default: 60)",
    )
    options = parser.parse_args(arguments)
    if options.dispatchers < 1 or options.timeout < 1:
        parser.error("--dispatchers and --timeout take numbers of at least 1")
    return options


@contextmanager
def _compute_service(options: argparse.Namespace) -> Iterator[TfDataServiceConfig | None]:
    """Run the service on rank 0, and write its configuration to the file. Other ranks do nothing.

    Raises:
        ValueError: on every rank, if the number of ranks is not a multiple of the number of dispatchers.
    """
    size = basics.size()
    if size % options.dispatchers:
        raise ValueError(
            f"{size} ranks cannot be divided evenly among {options.dispatchers} dispatchers; choose another number of either"
        )
    if basics.rank() != 0:
        yield None
        return
    key, workers = make_secret(), size // options.dispatchers
    interfaces = [name for name in settings.network_interfaces(os.environ).split(",") if name.strip()]
    with ComputeService(options.dispatchers, workers, key, interfaces or None) as service:
        config = TfDataServiceConfig(
            options.dispatchers, workers, options.dispatcher_side, service.addresses(), key, options.timeout
        )
        try:
            config.write(options.configfile)
            print(f"compute service with {size} workers; training jobs read {options.configfile}", flush=True)
            yield config
        finally:
            _remove(options.configfile, config)


def _remove(configfile: str, config: TfDataServiceConfig | None) -> None:
    """Remove the file that this rank wrote, unless another job has replaced it."""
    if config is None:
        return
    try:
        ours = TfDataServiceConfig.read(configfile) == config
    except (OSError, ValueError):
        return  # the file is gone, or another program has replaced it
    if ours:
        Path(configfile).unlink(missing_ok=True)


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
