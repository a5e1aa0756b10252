"""One cluster for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.hosts import Hosts, obstacle, without_blanks
from on_ray.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    why_not = obstacle()
    if why_not:
        pytest.skip(why_not)
    with without_blanks(tmp_path_factory.mktemp("r")) as folder:
        (folder / "ray").mkdir()
        hosts = Hosts(folder)
        try:
            hosts.start()
            cluster = RayCluster(hosts, folder)
            cluster.start()
            yield cluster
        finally:
            hosts.close()
