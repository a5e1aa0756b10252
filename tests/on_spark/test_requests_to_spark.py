"""What ``horovod.spark.run`` refuses before it asks Spark for anything."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: make test-spark")

import horovod.spark


def test_mpi_is_refused() -> None:
    with pytest.raises(ValueError, match="use_mpi: on Spark the ranks are started by Spark's tasks"):
        horovod.spark.run(print, use_mpi=True)


def test_without_a_session_there_is_nothing_to_run_on() -> None:
    with pytest.raises(Exception, match="Could not find an active SparkContext, are you running in a PySpark session"):
        horovod.spark.run(print, num_proc=2)


@pytest.mark.parametrize("text", ["0", "soon", "-1"])
def test_a_start_timeout_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"HOROVOD_SPARK_START_TIMEOUT='{text}': expected a number of seconds"):
        horovod.spark.run(print, num_proc=2)


def test_a_start_timeout_is_checked() -> None:
    with pytest.raises(ValueError, match="start_timeout must be at least 1 second, not 0"):
        horovod.spark.run(print, num_proc=2, start_timeout=0)
