"""The launcher's errors."""

from __future__ import annotations


class UsageError(ValueError):
    """The request itself is wrong: a flag, a host, a file, a command. One line that says what and why.

    ``horovodrun`` prints it with the usage and exits with status 2; :func:`horovod.run` raises it.
    """


class LaunchError(RuntimeError):
    """The request was sound, but this machine could not start a process of the job."""
