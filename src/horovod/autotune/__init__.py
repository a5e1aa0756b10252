"""Searches for the settings with the fastest steps while a job runs.

Rank 0 measures and decides (:mod:`horovod.autotune.tuner`), and the coordinator's orders carry the settings to all ranks.
Everything is pure, except for the two files (:mod:`horovod.autotune.kept`, :mod:`horovod.autotune.log`), and takes the time as
an argument.
"""
