"""The tree along which the members of a process set send announcements up and orders down. Pure.

On one host every member is connected with the first, the coordinator. On several hosts the first member of each host but the
coordinator's is a *relay*: it is connected with the coordinator, and the other members of its host with it. So the coordinator
has one connection for each other host. A relay adds two wake-ups to each message, so there are none if they would save the
coordinator only few connections.
"""

from __future__ import annotations

from collections.abc import Sequence

COORDINATOR = 0
"""The index of the member that decides for all."""


class Tree:
    """The connections of a process set. All arguments and results are member indices.

    Args:
        hosts: by member, the name of its host.
        least: the number of connections that relays must save the coordinator. If they save fewer, there are none.
    """

    def __init__(self, hosts: Sequence[str], least: int = 0) -> None:
        by_host: dict[str, list[int]] = {}
        for member, host in enumerate(hosts):
            by_host.setdefault(host, []).append(member)
        spared = sum(len(members) - 1 for members in by_host.values() if members[0] != COORDINATOR)
        if spared < least:
            by_host = {"": list(range(len(hosts)))}
        self._size = len(hosts)
        self._groups = {members[0]: _evenly(members) for members in by_host.values()}
        self._first = {member: group[0] for group in self._groups.values() for member in group}

    @classmethod
    def flat(cls, size: int) -> Tree:
        """A tree without relays."""
        return cls([""] * size)

    def __len__(self) -> int:
        return self._size

    def parent(self, member: int) -> int:
        """The member that a member other than the coordinator sends to."""
        first = self._first[member]
        return COORDINATOR if first == member else first

    def group(self, member: int) -> Sequence[int]:
        """The members that a relay speaks for: itself, and those that send to it. Of any other member, itself alone."""
        if member == COORDINATOR:
            return range(1)
        return self._groups.get(member, range(member, member + 1))

    def children(self, member: int) -> list[int]:
        """The indices of the members that send to this member."""
        if member == COORDINATOR:
            relays = [first for first in self._groups if first != COORDINATOR]
            return sorted([*self._groups[COORDINATOR][1:], *relays])
        return list(self.group(member)[1:])


def _evenly(members: list[int]) -> Sequence[int]:
    """The same members as a range, if they are evenly spaced."""
    step = members[1] - members[0] if len(members) > 1 else 1
    spaced = range(members[0], members[-1] + 1, step)
    return spaced if list(spaced) == members else members
