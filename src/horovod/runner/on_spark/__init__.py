"""What runs in the tasks of Spark: the launcher in that of partition 0, and its agents in the first task of each host.

:mod:`horovod.spark` starts the tasks. Nothing here imports PySpark, except a task that it has started.

    grouping         which task becomes which rank; pure
    meetings         how tasks exchange what they know
    carried_output   the ranks' output on its way to the driver
    spark_job        the launcher's job whose hosts are those of the tasks
    tasks            what each task does
"""
