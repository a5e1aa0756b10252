"""The caller's side of ``horovod.run``: runs a job whose ranks call one function, and collects the results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from horovod.runner import remote_call
from horovod.runner.job import Job
from horovod.runner.jobs import make_job
from horovod.runner.options import Options
from horovod.runner.output.outcome import Outcome
from horovod.runner.output.output import StreamSink
from horovod.runner.remote_call import REMOTE_CALL_KEY, RemoteCall, Result

_ENDED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated."
)
"""The beginning of the error of a job in which a rank failed, which programs look for."""


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
        RuntimeError: a rank failed; the message holds its traceback, and the cause is its exception, if that could be sent.
    """
    command = (executable or sys.executable, "-m", "horovod.runner.run_task")
    job = make(replace(options, command=command), os.environ, hosts_python=executable is None)
    task = RemoteCall.of(function, arguments, keywords)
    published = dict(remote_call.to_parts(REMOTE_CALL_KEY, remote_call.dumps(task)))
    outcome = job.run(StreamSink(sys.stdout), StreamSink(sys.stderr), published=published)
    results: dict[int, Result] = {}
    for rank in job.result_ranks:
        data = remote_call.from_parts(remote_call.result_key(rank), job.delivered)
        if data is not None:
            results[rank] = remote_call.loads(data)
    if outcome.failed:
        message = job.recorder_notice(outcome)
        if message:
            print(message, file=sys.stderr)
        _raise(outcome, results)
    for rank in job.result_ranks:
        if rank not in results:
            raise RuntimeError(f"rank {rank} ended, with exit code 0, before the function had returned a value")
    return [remote_call.loads(results[rank].value) for rank in job.result_ranks]


def _raise(outcome: Outcome, results: Mapping[int, Result]) -> NoReturn:
    culprit = outcome.culprit if outcome.called == "rank" else None
    if culprit is None:  # the program that started the ranks does not report which failed first
        culprit = next((rank for rank in sorted(results) if results[rank].traceback), None)
    result = None if culprit is None else results.get(culprit)
    begin = f"{_ENDED}\n" if outcome.culprit is not None else ""
    if result is None or not result.traceback:
        raise RuntimeError(f"{begin}{outcome.describe()}")
    raise RuntimeError(f"{begin}rank {culprit} failed:\n{result.traceback}") from _exception(result)


def _exception(result: Result) -> BaseException | None:
    try:
        error = remote_call.loads(result.error)
    except Exception:  # its class may run any code while it is unpickled; the traceback's text is enough then
        return None
    return error if isinstance(error, BaseException) else None
