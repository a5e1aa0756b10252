"""``horovodrun``: reads the command line, runs the job, reports how it ended, and exits with its status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from horovod.runner.arguments import USAGE, parse
from horovod.runner.errors import LaunchError, UsageError
from horovod.runner.options import Options


def run_commandline(arguments: Sequence[str] | None = None) -> int:
    """The program. Returns its exit status: 0, the failing rank's, 128 + a signal's number, or 2 for a wrong request."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options.check_build:
            from horovod.runner.check_build import check_build

            print(check_build())
            return 0
        if options.dump is not None:
            return _dump(options.dump)
        return _run(options)
    except UsageError as error:
        print(f"usage: {USAGE}\nhorovodrun: error: {error}", file=sys.stderr)
        return 2
    except LaunchError as error:
        print(f"horovodrun: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the job's own handling of signals began, or after it ended
        return 128 + signal.SIGINT


def _run(options: Options) -> int:
    if options.dry_run:
        from horovod.runner.jobs import make_job

        print(make_job(options, os.environ).dry_run())
        return 0
    # These imports cost time, so they come after the command line has been checked.
    from horovod.runner.jobs import make_job
    from horovod.runner.output.output import console
    from horovod.runner.signals import Insisted, SignalPipe

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide how the ranks end
    _open_standard_streams()
    pipe = SignalPipe()
    stdout, stderr = console(pipe)
    try:
        with pipe as signals:
            job = make_job(options, os.environ)
            outcome = job.run(stdout, stderr, signals)
            for words in (outcome.describe(), job.recorder_notice(outcome)):
                if words:
                    stderr.write(words + "\n")
            return outcome.status
    except Insisted as insisted:
        stderr.write("horovodrun: killed the job\n")
        return 128 + insisted.number


def _dump(target: str) -> int:
    from horovod.diagnose.__main__ import main as diagnose
    from horovod.runner.flight_recorders import request

    folder = request(target)
    print(f"horovodrun: what every rank did until now is in {folder}\n")
    return diagnose([str(folder)])


def _open_standard_streams() -> None:
    """Open the null device where a standard stream was closed (``>&-``), before another file gets its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os.set_inheritable(descriptor, True)  # the rank that reads standard input inherits it


if __name__ == "__main__":
    sys.exit(run_commandline())
