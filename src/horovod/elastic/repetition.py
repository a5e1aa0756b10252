"""Detects an elastic job whose rounds end repeatedly with the same exception of the script. Pure."""

from __future__ import annotations

from horovod.core.errors import HorovodInternalError, RankRaisedError, RepeatedFailureError

MOST_REPETITIONS = 3
"""How many rounds in a row may end with the same exception of the script, without a completed step, before the job ends."""


class Repetition:
    """The exceptions that have ended the last rounds."""

    def __init__(self) -> None:
        self._reason = ""
        self._times = 0
        self._checks = 0

    def after(self, error: HorovodInternalError, checks: int) -> HorovodInternalError:
        """The error that has ended the round, or, after the same error in too many rounds, a :class:`RepeatedFailureError`.

        A rank that is lost for another reason does not count, and does not interrupt the count.

        Args:
            checks: the number of commits and checks that all ranks have reached, in all rounds.
        """
        if not isinstance(error, RankRaisedError):
            return error
        again = error.reason == self._reason and checks == self._checks
        self._times = self._times + 1 if again else 1
        self._reason, self._checks = error.reason, checks
        if self._times < MOST_REPETITIONS:
            return error
        return RepeatedFailureError(
            f"{self._times} rounds in a row have ended by the same exception of the script, and no step was completed between "
            f"them, so another round would end in the same way: {error}",
            ranks=error.ranks,
            tensor=error.tensor,
            call_sites=error.call_sites,
            reason=error.reason,
        )
