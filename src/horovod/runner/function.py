"""The caller's side of ``horovod.run``: runs a job whose ranks call one function, and collects the results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horovod.runner import remote_call
from horovod.runner.job import Job
from horovod.runner.jobs import make_job
from horovod.runner.options import Options
from horovod.runner.output.outcome import Outcome
from horovod.runner.output.output import Sink, StreamSink
from horovod.runner.remote_call import REMOTE_CALL_KEY, RemoteCall, Result

_ENDED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated."
)
"""The beginning of the error of a job in which a rank failed, which programs look for."""


@dataclass(frozen=True)
class FinishedCall:
    """What a job has come to whose ranks have called one function."""

    ranks: Sequence[int]
    """Those whose values count."""
    results: Mapping[int, Result]
    """By rank; of those that have sent one."""
    failure: str = ""
    """The text of the error of the job; "" if it went well."""
    culprit: int | None = None
    """The rank whose exception the error has."""

    def values(self) -> list[Any]:
        """The values by rank.

        Raises:
            RuntimeError: a rank failed; the message holds its traceback, and the cause is its exception, if that could be sent.
        """
        if self.failure:
            raise RuntimeError(self.failure) from (
                None if self.culprit is None else _exception(self.results[self.culprit])
            )
        for rank in self.ranks:
            if rank not in self.results:
                raise RuntimeError(f"rank {rank} ended, with exit code 0, before the function had returned a value")
        return [remote_call.loads(self.results[rank].value) for rank in self.ranks]


def run_function(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    options: Options,
    executable: str | None,
    make: Callable[..., Job] = make_job,
) -> list[Any]:
    """Call ``function`` on every rank and return the values by rank.

    Args:
        make: makes the job, as :func:`~horovod.runner.jobs.make_job`.

    Raises:
        ValueError: the request cannot be met.
        RuntimeError: as :meth:`FinishedCall.values`.
    """
    call = RemoteCall.of(function, arguments, keywords)
    return call_on_ranks(call, options, executable, make, StreamSink(sys.stdout), StreamSink(sys.stderr)).values()


def call_on_ranks(
    call: RemoteCall, options: Options, executable: str | None, make: Callable[..., Job], stdout: Sink, stderr: Sink
) -> FinishedCall:
    """Make ``call`` on every rank.

    Args:
        make: as for :func:`run_function`.
        stdout, stderr: where the ranks' output goes.

    Raises:
        ValueError: the request cannot be met.
        LaunchError: a process could not be started.
    """
    command = (executable or sys.executable, "-m", "horovod.runner.run_task")
    job = make(replace(options, command=command), os.environ, hosts_python=executable is None)
    published = dict(remote_call.to_parts(REMOTE_CALL_KEY, remote_call.dumps(call)))
    outcome = job.run(stdout, stderr, published=published)
    results: dict[int, Result] = {}
    for rank in job.result_ranks:
        data = remote_call.from_parts(remote_call.result_key(rank), job.delivered)
        if data is not None:
            results[rank] = remote_call.loads(data)
    if not outcome.failed:
        return FinishedCall(job.result_ranks, results)
    message = job.recorder_notice(outcome)
    if message:
        stderr.show("", [f"{message}\n"])
    return FinishedCall(job.result_ranks, results, *_failure(outcome, results))


def _failure(outcome: Outcome, results: Mapping[int, Result]) -> tuple[str, int | None]:
    """The text of the error, and the rank whose exception it has."""
    culprit = outcome.culprit if outcome.called == "rank" else None
    if culprit is None:  # the program that started the ranks does not report which failed first
        culprit = next((rank for rank in sorted(results) if results[rank].traceback), None)
    result = None if culprit is None else results.get(culprit)
    begin = f"{_ENDED}\n" if outcome.culprit is not None else ""
    if result is None or not result.traceback:
        return f"{begin}{outcome.describe()}", None
    return f"{begin}rank {culprit} failed:\n{result.traceback}", culprit


def _exception(result: Result) -> BaseException | None:
    try:
        error = remote_call.loads(result.error)
    except Exception:  # its class may run any code while it is unpickled; the traceback's text is enough then
        return None
    return error if isinstance(error, BaseException) else None
