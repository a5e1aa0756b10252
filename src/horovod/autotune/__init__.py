"""Searches for the settings with which the steps of a job are quickest, while the job runs.

Rank 0 measures and decides (:mod:`horovod.autotune.tuner`); the coordinator's orders carry what it decides to all ranks. All of
it is pure but for the two files (:mod:`horovod.autotune.kept`, :mod:`horovod.autotune.log`), and takes the time as an argument.
"""
