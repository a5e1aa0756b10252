"""The settings of ``horovod.spark.conf``: pairs that Spark takes."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: make test-spark")

from horovod.spark import conf

PAIRS = {
    name: value for name, value in vars(conf).items() if name.startswith("SPARK_CONF_") and isinstance(value, tuple)
}


def test_every_setting_of_the_interface_is_there() -> None:
    same_task = {
        f"SPARK_CONF_{how}_FOR_SAME_TASK"
        for where in ("EXECUTOR", "NODE")
        for how in (f"REUSE_{where}_ALWAYS", f"REUSE_{where}_ONCE", f"DONT_REUSE_{where}")
    }
    failed = {
        f"SPARK_CONF_{begin}REUSE_{what}{end}"
        for begin in ("", "DONT_")
        for what in ("FAILED_EXECUTOR", "FAILING_NODE")
        for end in ("", "_IN_APP")
    }
    others = {
        f"SPARK_CONF_{name}" for name in ("ALWAYS_RESTART_FAILED_TASK", "BLACKLIST_ENABLED", "BLACKLIST_DISABLED")
    }
    assert set(PAIRS) == same_task | failed | others


def test_settings_are_texts_and_each_key_has_a_default() -> None:
    assert {key for key, _ in PAIRS.values()} == set(conf.SPARK_CONF_DEFAULT_VALUES)
    assert all(isinstance(part, str) for pair in PAIRS.values() for part in pair)
    assert int(conf.SPARK_CONF_MAX_INT) == 2**31 - 1 and int(conf.SPARK_CONF_MAX_INT_MINUS_ONE) == 2**31 - 2


def test_attempts_on_a_node_stay_below_the_failures_of_a_task() -> None:
    """Spark refuses other values."""
    _, attempts = conf.SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK
    _, failures = conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK
    assert int(attempts) < int(failures)
