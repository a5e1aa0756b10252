"""Values from rank 0 for the callbacks of :meth:`RayExecutor.run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod._base import config
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.secret import decode_secret
from horovod.environments import identity
from horovod.runner import remote_call

KEY = "ray_logger/"
"""The beginning of the keys under which values are sent."""
Callback = Callable[[dict[str, Any]], Any]
_SECONDS = 60.0

_queue: Any = None


def configure(queue: Any) -> None:
    """Put the values into ``queue``, an object with a method ``put``, instead of sending them to the executor."""
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Call the executor's callbacks with ``info_dict``. Does nothing on other ranks than 0.

    Raises:
        KeyError: no :class:`~horovod.ray.runner.RayExecutor` has started this process.
    """
    if identity().rank != 0:
        return
    if _queue is not None:
        _queue.put(info_dict)
        return
    address = os.environ[config.RENDEZVOUS_ADDRESS], int(os.environ[config.RENDEZVOUS_PORT])
    with RendezvousClient(address, decode_secret(os.environ[config.SECRET_KEY]), _SECONDS) as client:
        client.put(KEY, remote_call.dumps(dict(info_dict)))


def call_all(callbacks: Sequence[Callback], value: bytes) -> None:
    """Call each with a value that rank 0 has logged."""
    logged = remote_call.loads(value)
    for each in callbacks:
        each(logged)
