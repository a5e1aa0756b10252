"""``horovodrun``: reads the command line, runs the job, reports how it ended, and exits with its status.

:func:`main` is the program. Python code that starts a job in the same way calls :func:`run_commandline`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from horovod.runner.arguments import parse
from horovod.runner.errors import LaunchError, UsageError
from horovod.runner.help_text import USAGE
from horovod.runner.options import Options
from horovod.runner.signals import SecondSignal, SignalPipe, end_at_signals, ignore_signals


class JobFailed(RuntimeError, SystemExit):
    """A job that :func:`run_commandline` ran has failed, or was interrupted.

    If the exception is not caught, the program ends with the job's exit status and without a traceback, because the end of the
    job has been printed already.

    Attributes:
        code: the exit status of ``horovodrun``: the failing rank's, or 128 + a signal's number.
    """

    code: int

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class WrongRequest(UsageError, SystemExit):
    """The command line is wrong. Uncaught, it ends the program with status 2 and without a traceback."""

    code: int = 2


def run_commandline(arguments: Sequence[str] | None = None) -> int:
    """Do what ``horovodrun`` does, for a caller in Python. The ranks' output goes to this process's standard streams.

    Args:
        arguments: the command line without the program's name. The default is that of this process.

    Returns:
        0. The job has succeeded.

    Raises:
        JobFailed: the job failed; a RuntimeError.
        LaunchError: a process of the job could not be started; a RuntimeError.
        WrongRequest: the command line is wrong; a ValueError.
        SystemExit: ``--help`` or ``--version`` was asked for, and has been printed.
    """
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options.check_build:
            return _check_build()
        if options.check_gpu:
            from horovod.runner import gpu_report

            return gpu_report.main(options.command)
        if options.dump is not None:
            return _dump(options.dump)
        if options.top is not None:
            return _top(options.top)
        status, message = _carry_out(options)
    except UsageError as error:
        print(f"usage: {USAGE}\nhorovodrun: error: {error}", file=sys.stderr)
        raise WrongRequest(str(error)) from None
    except LaunchError as error:
        print(f"horovodrun: error: {error}", file=sys.stderr)
        raise
    if status:
        raise JobFailed(message, status)
    return 0


def _run(args: Any) -> Any:
    """Run the job that an object like :class:`horovod.runner._HorovodArgs` describes.

    Returns:
        With ``args.run_func``, what it returns on each rank, as :func:`horovod.run`. Otherwise None.

    Raises:
        the errors of :func:`run_commandline` or, with ``args.run_func``, of :func:`horovod.run`.
    """
    from horovod.runner.tunables import TUNABLES

    given: dict[str, Any] = {
        each.name: getattr(args, each.name, None) for each in fields(Options) if each.name != "tunables"
    }
    for name, order in (("command", list), ("nics", sorted), ("cooldown_range", list)):
        if given[name] is not None:
            given[name] = tuple(order(given[name]))
    tunables = {each.name: getattr(args, each.name, None) for each in TUNABLES}
    options = Options(
        **{name: value for name, value in given.items() if value is not None},
        tunables={name: value for name, value in tunables.items() if value is not None},
    )
    run_func = getattr(args, "run_func", None)
    if run_func is not None:
        from horovod.runner.function import run_function

        return run_function(run_func, (), {}, options, getattr(args, "executable", None))
    if not options.command:
        raise UsageError("the command is missing: set it, as in args.command = ['python', 'train.py']")
    status, message = _carry_out(options)
    if status:
        raise JobFailed(message, status)
    return None


def main() -> int:
    """The program. Returns its exit status: 0, the failing rank's, 128 + a signal's number, or 2 for a wrong request."""
    end_at_signals()
    try:
        return _status()
    finally:
        ignore_signals()


def _status() -> int:
    try:
        try:
            return run_commandline()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at its end, the interpreter would print an error that occurs here
    except BrokenPipeError:
        # The reader of --dry-run or --check-build has ended, as `head` does. A job notices it itself.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except (JobFailed, WrongRequest) as end:
        return end.code
    except LaunchError:
        return 1


def _carry_out(options: Options) -> tuple[int, str]:
    """Run the job. Returns the exit status and, if the job failed, the message about its end."""
    if options.dry_run:
        from horovod.runner.jobs import make_job

        print(make_job(options, os.environ).dry_run())
        return 0, ""
    # These imports cost time, so they come after the command line has been checked.
    from horovod.runner.jobs import make_job
    from horovod.runner.output.output import console

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide how the ranks end
    _open_standard_streams()
    pipe = SignalPipe()
    stdout, stderr = console(pipe)
    try:
        pipe.ends_at_once = True  # the first run of a discovery script may take long
        with pipe as signals:
            job = make_job(options, os.environ)
            signals.ends_at_once = False
            outcome = job.run(stdout, stderr, signals)
            message = outcome.describe()
            for text in (outcome.describe(below_output=True), job.recorder_notice(outcome)):
                if text:
                    stderr.write(text + "\n")
            return outcome.status, message
    except SecondSignal as second:
        message = "horovodrun: killed the job"
        stderr.write(message + "\n")
        return 128 + second.number, message


def _check_build() -> int:
    from horovod.runner.check_build import check_build

    pipe = SignalPipe()
    pipe.ends_at_once = True  # with the probes
    with pipe:
        print(check_build())
    return 0


def _dump(target: str) -> int:
    from horovod.diagnose.__main__ import main as diagnose
    from horovod.runner.flight_recorders import request

    folder = request(target)
    print(f"horovodrun: what every rank did until now is in {folder}\n")
    return diagnose([str(folder)])


def _top(target: str) -> int:
    from horovod.top.__main__ import main as top

    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C is how the view ends
    try:
        return top([target])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _open_standard_streams() -> None:
    """Open the null device where a standard stream was closed (``>&-``), before another file gets its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os.set_inheritable(descriptor, True)  # the rank that reads standard input inherits it


if __name__ == "__main__":
    sys.exit(main())
