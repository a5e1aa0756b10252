"""Arguments for another program that the user gives in one flag, such as ``--mpi-args="..."``."""

from __future__ import annotations

import shlex

from horovod.runner.errors import UsageError


def split_arguments(flag: str, text: str | None) -> list[str]:
    """The arguments in a flag's value, as a shell would split it.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UsageError(f"{flag}={text!r}: {error}") from None
