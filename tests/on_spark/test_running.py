"""``horovod.spark.run`` on a real cluster: two executors of Spark on this machine."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: make test-spark")

import pyspark

from on_spark.spark_cluster import LIMIT, SparkPrograms

pytestmark = pytest.mark.timeout(LIMIT + 60)
MNIST = os.environ.get("MNIST", "")
"""An .npz file with the 10,000 images of MNIST's test split; scikit-learn's digits without it."""
ACCURACY = 0.97 if MNIST else 0.85


def needs_connect() -> None:
    if int(pyspark.__version__.partition(".")[0]) < 4:
        pytest.skip("the package of Spark 3.5 brings no server of Spark Connect")
    pytest.importorskip("grpc", reason="Spark Connect needs pyspark[connect]")


def test_ranks_return_values_print_and_fail(spark: SparkPrograms) -> None:
    found = spark.result("whole")
    assert found["ranks"] == [[rank, 4, rank, 4, 0, 6.0, 42, "yes"] for rank in range(4)]
    assert found["output"] == [f"[{rank}]<stdout>:I am rank {rank}" for rank in range(4)]
    kind, text, cause = found["error"]
    assert kind == "RuntimeError" and cause == "KeyError"
    assert "rank 1 failed:" in text and "programs.py" in text and "no data on this rank" in text
    assert [each[:2] for each in found["after"]] == [[0, 2], [1, 2]]
    assert found["group"] is None, "the job group of the caller is its own"
    kind, text, _ = found["too many"]
    assert kind == "TimeoutException" and "99 tasks of Spark to start" in text and "start_timeout" in text


def test_executors_in_containers_are_hosts(spark: SparkPrograms) -> None:
    found = spark.result("ranks", settings={"spark.python.daemon.module": "container_daemon"})
    assert [each[:6] for each in found] == [
        [0, 4, 0, 2, 0, 6.0], [1, 4, 1, 2, 0, 6.0], [2, 4, 0, 2, 1, 6.0], [3, 4, 1, 2, 1, 6.0],
    ]  # fmt: skip


def test_plain_tasks_become_ranks_where_spark_refuses_barrier_mode(spark: SparkPrograms) -> None:
    found = spark.result(
        "ranks",
        settings={
            "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.shuffleTracking.enabled": "true",
            "spark.dynamicAllocation.initialExecutors": "2",
            "spark.executor.cores": "2",
        },
    )
    assert [each[:2] for each in found] == [[rank, 4] for rank in range(4)]


def test_a_killed_executor_ends_the_job_with_sparks_reason(spark: SparkPrograms) -> None:
    found = spark.result("without_an_executor")
    assert found["ranks"] == 4 and found["left"] == 0
    assert "does not train again from the beginning" in found["error"] and "ExecutorLostFailure" in found["error"]


def test_ranks_of_spark_connect(spark: SparkPrograms) -> None:
    needs_connect()
    found = spark.result("through_connect")
    assert found["ranks"] == [[rank, 4, rank, 4, 0, 6.0, 0, "yes"] for rank in range(4)]
    assert found["output"] == [f"[{rank}]<stdout>:I am rank {rank}" for rank in range(4)]
    kind, text, cause = found["error"]
    assert kind == "RuntimeError" and cause == "KeyError" and "rank 1 failed:" in text


@pytest.mark.parametrize("how", ["context", "connect"])
def test_the_example_learns(spark: SparkPrograms, how: str) -> None:
    if how == "connect":
        needs_connect()
    found = spark.result("mnist", how, MNIST or "digits", "5" if MNIST else "10")
    assert found[0] == found[1] and found[0]["ranks"] == 2
    assert found[0]["accuracy"] >= ACCURACY, found
