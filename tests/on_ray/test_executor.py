"""``horovod.ray`` on a real cluster: ranks as actors, and elastic jobs on its nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from cluster.hosts import ADDRESSES
from on_ray.ray_cluster import RayCluster

through_a_client_too = pytest.mark.parametrize("client", [False, True], ids=["in the cluster", "client"])
"""The program runs on a node of the cluster, or on another host as a client."""


@through_a_client_too
def test_ranks_of_two_hosts_stay_between_calls(cluster: RayCluster, client: bool) -> None:
    found = cluster.result("static", client=client)
    assert found["ranks"] == [
        [0, 4, 0, 2, 0, 6.0, 12], [1, 4, 1, 2, 0, 6.0, 12], [2, 4, 0, 2, 1, 6.0, 12], [3, 4, 1, 2, 1, 6.0, 12],
    ]  # fmt: skip
    assert found["again"] == [14] * 4 and found["single"] == 16 and found["run"] == [3] * 4
    assert found["by gloo"] == [6.0] * 4
    assert found["references"] == ["yes"] * 4 and found["workers"] == 4
    assert found["logged"] == ([] if client else [{"rank": 0}]), "callbacks of a client are called in the cluster"


def test_the_caller_gets_the_error_of_the_rank_that_failed_by_itself(cluster: RayCluster) -> None:
    found = cluster.result("failing", "raise")
    names, text = found["error"]
    assert "ValueError" in names and "no data on this rank" in text
    assert [each[:2] for each in found["after"]] == [[0, 3], [1, 3], [2, 3]]


def test_a_rank_whose_process_ends_is_the_error(cluster: RayCluster) -> None:
    names, _ = cluster.result("failing", "exit")["error"]
    assert "RayActorError" in names


def test_ranks_run_in_the_placement_group_of_their_caller(cluster: RayCluster) -> None:
    assert [each[:2] for each in cluster.result("inside_a_placement_group")] == [[0, 2], [1, 2]]


def test_a_cluster_without_room_is_said_so(cluster: RayCluster) -> None:
    text = cluster.result("no_room")
    assert "within 2 seconds" in text and "'CPU': 4.0" in text


@through_a_client_too
def test_the_elastic_executor_of_earlier_versions(cluster: RayCluster, client: bool) -> None:
    found = cluster.result("elastic_of_old", client=client)
    assert [each[0] for each in found] == [0, 1] and found[0][1] in (2, 3)
    in_cluster = {ADDRESSES["hostA"], ADDRESSES[cluster.second]}
    assert all(mine == "yes" and launcher in in_cluster for *_, mine, launcher in found)


def test_an_elastic_job_goes_on_without_a_node_and_takes_in_another(cluster: RayCluster) -> None:
    lost, new = cluster.second, cluster.spare
    process = cluster.program("elastic", "4", "2", "4")
    assert process.stdout is not None
    said = ""
    while "there are 4" not in said:
        said = process.stdout.readline()
        assert said or process.poll() is None
    cluster.replace_second()
    found = cluster.finish(process)
    assert [each[:2] for each in found["ranks"]] == [[0, 4], [1, 4]]
    assert [each["size"] for each in found["logged"]] == [4, 2, 4]
    hosts = [{host for host, _ in each["processes"]} for each in found["logged"]]
    assert hosts == [{"hostA", lost}, {"hostA"}, {"hostA", new}]
    on_a = [[pid for host, pid in each["processes"] if host == "hostA"] for each in found["logged"]]
    assert on_a[0] == on_a[1] == on_a[2], "the processes of the host that stayed have gone on"
