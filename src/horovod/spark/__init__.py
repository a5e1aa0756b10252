"""Horovod on Spark: :func:`run` calls a function on ranks in the tasks of a Spark job.

    conf            settings of Spark for tasks that fail
    spark_context   runs and watches the tasks from the driver
    spark_connect   runs them from a client of Spark Connect
    sessions        which of the two there is
    starting        run

Spark places the tasks; what runs in them is in :mod:`horovod.runner.on_spark`. The source of the interface is ``horovod.spark``
of Horovod 0.28.
"""

from __future__ import annotations

try:
    import pyspark as _pyspark  # noqa: F401  to say what to install
except ImportError as error:
    from horovod._bindings.frameworks import missing

    raise missing(error, "horovod.spark", "PySpark 3.5 or newer", "spark") from error

from horovod.spark.starting import run

__all__ = ["run"]
