"""Chooses what starts the ranks of a job: this launcher, or a program that starts all of them."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.runner.elastic import elastic_job
from horovod.runner.job import Job
from horovod.runner.options import Options


def make_job(options: Options, environment: Mapping[str, str], *, hosts_python: bool = False) -> Job:
    """The job that the user has asked for. Starts nothing. See :class:`Job` for the arguments and errors."""
    if elastic_job.is_wanted(options):
        return elastic_job.ElasticJob(options, environment, hosts_python=hosts_python)
    if options.use_mpi:
        from horovod.runner.external.mpi.mpi_job import MpiJob  # costs time, which other jobs need not spend

        return MpiJob(options, environment, hosts_python=hosts_python)
    if options.use_jsrun or environment.get("LSB_JOBID"):
        from horovod.runner.external import jsrun  # costs time, which other jobs need not spend

        if jsrun.is_wanted(options, environment):
            return jsrun.JsrunJob(options, environment, hosts_python=hosts_python)
    return Job(options, environment, hosts_python=hosts_python)
