"""Settings of Spark as ``(key, value)``, for ``SparkConf().set(*...)``: how often Spark starts a failed task again, and where.

``horovod.spark.run`` needs none of them: its jobs do not survive the loss of a task. The keys are those of Spark 3.0, which
later versions accept as older names of ``spark.excludeOnFailure.*``. Meanings and defaults are those of Spark's page on its
configuration.
"""

from __future__ import annotations

SPARK_CONF_MAX_INT = "2147483647"
SPARK_CONF_MAX_INT_MINUS_ONE = "2147483646"
"""Spark wants some limits to be below the limit of a task's failures."""

_TASK = "spark.task.maxFailures"
_ENABLED = "spark.blacklist.enabled"
_SAME_TASK_EXECUTOR = "spark.blacklist.task.maxTaskAttemptsPerExecutor"
_SAME_TASK_NODE = "spark.blacklist.task.maxTaskAttemptsPerNode"
_STAGE_EXECUTOR = "spark.blacklist.stage.maxFailedTasksPerExecutor"
_STAGE_NODE = "spark.blacklist.stage.maxFailedExecutorsPerNode"
_APP_EXECUTOR = "spark.blacklist.application.maxFailedTasksPerExecutor"
_APP_NODE = "spark.blacklist.application.maxFailedExecutorsPerNode"

SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = (_TASK, SPARK_CONF_MAX_INT)

SPARK_CONF_BLACKLIST_ENABLED = (_ENABLED, "true")
SPARK_CONF_BLACKLIST_DISABLED = (_ENABLED, "false")

# An executor, or a node, on which the same task has failed.
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (_SAME_TASK_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (_SAME_TASK_EXECUTOR, "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (_SAME_TASK_EXECUTOR, "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (_SAME_TASK_NODE, SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (_SAME_TASK_NODE, "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (_SAME_TASK_NODE, "1")

# An executor on which any task of the stage has failed, or a node on which executors have.
SPARK_CONF_REUSE_FAILED_EXECUTOR = (_STAGE_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (_STAGE_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE = (_STAGE_NODE, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (_STAGE_NODE, "1")

# The same for the whole application.
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (_APP_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (_APP_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (_APP_NODE, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (_APP_NODE, "1")

SPARK_CONF_DEFAULT_VALUES = {
    _TASK: "4",
    _ENABLED: "false",
    _SAME_TASK_EXECUTOR: "1",
    _SAME_TASK_NODE: "2",
    _STAGE_EXECUTOR: "2",
    _STAGE_NODE: "2",
    _APP_EXECUTOR: "2",
    _APP_NODE: "2",
}
"""What Spark uses for those that are not set."""
