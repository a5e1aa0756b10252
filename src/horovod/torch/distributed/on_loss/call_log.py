"""Which calls of a group this rank has made, completed and handed out to the script. Pure.

Calls have numbers from 1, the same on all ranks. A call is *completed* on a rank that has its result in memory of its own. It
is *handed out* when the script may see the result. The rule of the whole: a call is handed out only when every member of the
carrier has completed it. Each member shows the others up to which call it has completed all, and the lowest of these numbers
counts.

After a loss, the ranks that are left tell each other up to which call they have handed out. What one of them has handed out,
all of them have completed, and all of them hand it out. They make all later calls again, among themselves.
"""

from __future__ import annotations


class CallLog:
    """The numbers of one rank.

    Attributes:
        made: how many calls the script has made.
        completed: up to which call all have been completed by the present carrier or an earlier one.
        handed: up to which call all have been handed out.
    """

    def __init__(self) -> None:
        self.made = self.completed = self.handed = 0

    def call(self) -> int:
        """The script makes a call. Returns its number."""
        self.made += 1
        return self.made

    def complete(self, number: int) -> None:
        """All calls up to ``number`` have been completed."""
        assert self.completed <= number <= self.made, (self.completed, number, self.made)
        self.completed = number

    def agreed(self, lowest: int) -> range:
        """Every member has completed all calls up to ``lowest``. Returns the calls to hand out now."""
        return self._hand_out(lowest)

    def met(self, furthest: int) -> tuple[range, range]:
        """The ranks that are left have met: one of them has handed out all calls up to ``furthest``, and none further.

        Returns the calls to hand out now, and those to make again.
        """
        handing = self._hand_out(furthest)
        self.completed = self.handed  # what was completed beyond, not all have
        return handing, range(self.handed + 1, self.made + 1)

    def _hand_out(self, number: int) -> range:
        assert self.handed <= number <= self.completed, (self.handed, number, self.completed)
        handing = range(self.handed + 1, number + 1)
        self.handed = number
        return handing
