"""Horovod on Ray: :class:`RayExecutor` runs functions on ranks that are Ray actors.

    settings        what a caller may set
    base_worker     one rank: an actor that calls functions
    placement       where actors run: in bundles of a placement group, or a number on each host
    registration    numbers ranks by node, and starts the server where they meet
    workers         the ranks of a job that is not elastic
    agents          agents on the nodes, for elastic jobs
    elastic         elastic jobs: the nodes of the cluster are the hosts
    ray_logger      values from rank 0 for the caller's callbacks
    runner          the executor
    utils           network interfaces

Ray places, starts and ends the processes. The source of the interface is ``horovod.ray`` of Horovod 0.28.
"""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401  to say what to install
except ImportError as error:
    from horovod._bindings.frameworks import missing

    raise missing(error, "horovod.ray", "Ray 2.9 or newer", "ray") from error

from horovod.ray.base_worker import BaseHorovodWorker
from horovod.ray.elastic import ElasticRayExecutor
from horovod.ray.runner import RayExecutor

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
