"""Compares outer parameters across hosts. Between outer steps the hosts' parameters differ, and must; ranks of one host are
compared at every step, since their optimizer reduces over the ranks of that host."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.comparison.alike import Alike, Value, decode, encode, is_compared, made_at, tell
from horovod.comparison.comparison import Comparison
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle.context import running


class OuterComparison:
    """The comparison of one optimizer's outer parameters: each fragment right after its outer step.

    A comparison begins when a fragment is applied, and its result is read when the next one is, so no rank waits for it.

    Args:
        line: the line of the script that made the optimizer.
    """

    def __init__(self, line: str) -> None:
        self._line = line
        self._generation = -1
        self._reported = False
        self._running: Comparison | HorovodInternalError | None = None

    @property
    def wanted(self) -> bool:
        """Whether :meth:`begin` compares anything now. The same on all ranks."""
        generation = running().generation
        if (
            generation != self._generation
        ):  # what has begun before has failed; a process that has just arrived has reported nothing
            self._generation, self._reported, self._running = generation, False, None
        return is_compared() and not self._reported

    def begin(self, name: str, held: Mapping[str, Value]) -> None:
        """Compare what the ranks hold. All ranks call it after the same outer step, if :attr:`wanted`.

        Args:
            name: of the optimizer.
            held: by parameter, some elements.
        """
        try:
            self._running = Comparison(f"{name}.outer", encode(held), 0, self._line)
        except (
            HorovodInternalError
        ) as error:  # perhaps another rank has ended after its last step: then no rank reads it
            self._running = error

    def finish(self) -> None:
        """Read the result of the last comparison. All ranks call it at the same point.

        Raises:
            MismatchError: the hosts differ, and ``HOROVOD_CHECK=error``.
            HorovodInternalError: the comparison has failed.
        """
        if not self.wanted or self._running is None:
            return
        comparison, self._running = self._running, None
        if isinstance(comparison, HorovodInternalError):
            raise comparison
        rows = comparison.wait()
        if rows is not None:
            self._reported = tell(Alike.OUTER, {rank: decode(row) for rank, row in rows.items()}, made_at(self._line))
