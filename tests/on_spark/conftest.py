"""Programs of the tests on Spark."""

from __future__ import annotations

import pytest

from on_spark.spark_cluster import SparkPrograms, obstacle


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> SparkPrograms:
    why_not = obstacle()
    if why_not:
        pytest.skip(why_not)
    return SparkPrograms(tmp_path_factory.mktemp("spark"))
