"""Where the actors of a job run, and that Ray reserves what they need before any starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.runner.timeout import TimeoutException


@dataclass(frozen=True)
class WorkerSpec:
    """How many workers, with what each, and where.

    Attributes:
        workers: how many.
        workers_per_host: each host has this many; None lets Ray choose, packed onto as few hosts as it can.
        cpus, gpus: of each worker.
        use_current: in the placement group of the calling task or actor, if it has one.
    """

    workers: int
    workers_per_host: int | None
    cpus: float
    gpus: float
    use_current: bool

    def bundles(self) -> list[dict[str, float]]:
        """The resources to reserve, one bundle for each worker or host."""
        each = self.workers_per_host or 1
        bundle = {"CPU": each * self.cpus, "GPU": each * self.gpus}
        return [{name: amount for name, amount in bundle.items() if amount}] * (self.workers // each)


class Placement:
    """Reserved resources. :meth:`release` gives them back.

    Raises:
        TimeoutException: Ray did not reserve them within ``seconds``.
    """

    def __init__(self, spec: WorkerSpec, seconds: float) -> None:
        self._spec = spec
        self._group = get_current_placement_group() if spec.use_current and not spec.workers_per_host else None
        self._owned = self._group is None
        if not self._owned:
            return
        bundles = spec.bundles()
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if spec.workers_per_host else "PACK")
        try:
            ray.get(self._group.ready(), timeout=seconds)
        except GetTimeoutError:
            self.release()
            raise TimeoutException(
                f"Ray has not reserved {bundles} within {seconds:g} seconds (placement_group_timeout_s). The cluster has "
                f"{ray.cluster_resources()}, of which {ray.available_resources()} are free."
            ) from None

    def options(self, worker: int) -> dict[str, Any]:
        """The options of the actor of a worker."""
        bundle = -1 if not self._owned else worker // (self._spec.workers_per_host or 1)
        return {
            "num_cpus": self._spec.cpus,
            "num_gpus": self._spec.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
        }

    def release(self) -> None:
        """Give the resources back, if this object has reserved them. Actors in them end."""
        if self._owned and self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def by_node(nodes: Sequence[str]) -> list[int]:
    """The workers in the order of their ranks: those of one node after each other, nodes by their first worker. Pure.

    Args:
        nodes: the node of each worker.
    """
    first = {node: number for number, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda worker: (first[nodes[worker]], worker))
