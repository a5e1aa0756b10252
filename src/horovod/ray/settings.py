"""What a caller of :class:`~horovod.ray.runner.RayExecutor` may set."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.timeout import Timeout

_STARTING = (
    "Timed out waiting for {activity}. Please check that the Ray cluster has enough free resources to run all workers."
)


@dataclass
class MiniSettings:
    """Settings of an executor; :meth:`RayExecutor.create_settings` makes them.

    Attributes:
        nics: the network interfaces that ranks may use; None for all.
        verbose: accepted for compatibility.
        key, ssh_port, ssh_identity_file: accepted for compatibility: Ray starts processes, and each job has its own key.
        timeout_s: seconds that the workers may take to start once Ray has reserved their resources.
        placement_group_timeout_s: seconds that Ray may take to reserve the resources of all workers.
    """

    nics: Collection[str] | None = None
    verbose: int = 2
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100

    @property
    def start_timeout(self) -> Timeout:
        """The time limit of a start that begins now."""
        return Timeout(self.timeout_s, _STARTING)


@dataclass
class ElasticSettings(MiniSettings):
    """Settings of an elastic job.

    Attributes:
        min_num_proc, max_num_proc: how many ranks a round has at least and at most; None for as many as there are slots.
        reset_limit: how many rounds may follow the first; None for any number.
        elastic_timeout: seconds to wait for enough slots.
        cooldown_range: the shortest and the longest time in seconds for which a host is left out after a failure; None: for
            ever.
        discovery: finds the hosts; None for the nodes of the cluster.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: int = 600
    cooldown_range: tuple[int, int] | None = None
    discovery: HostDiscovery | None = None
