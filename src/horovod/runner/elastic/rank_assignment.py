"""Which process has which rank in a round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovod.runner.hosts.slots import SlotInfo


class RoundMember(NamedTuple):
    """A process that takes part in a round.

    Attributes:
        number: the number of the process; older processes have lower numbers.
        host: the name of its host.
        slot: the index of its slot on the host, from 0.
        has_state: whether it has the job's state.
    """

    number: int
    host: str
    slot: int
    has_state: bool


def assign(members: Sequence[RoundMember]) -> Mapping[int, SlotInfo]:
    """The rank assignment of each process, by its number.

    Hosts are ordered by the age of their oldest process that has the state, and the processes of a host by their age, those
    with the state first. So survivors keep their order, rank 0 is one of them, and new ranks come last on their hosts. Local
    ranks follow the slots: a process that replaces another one gets its local rank, and with it its device.
    """
    by_age = sorted(members, key=lambda member: (not member.has_state, member.number))
    hosts: dict[str, list[RoundMember]] = {}
    for member in by_age:
        hosts.setdefault(member.host, []).append(member)
    local_ranks = {
        member.number: index
        for on_host in hosts.values()
        for index, member in enumerate(sorted(on_host, key=lambda each: each.slot))
    }
    peers = {
        local_rank: {
            name: index for index, name in enumerate(name for name, on in hosts.items() if len(on) > local_rank)
        }
        for local_rank in range(max(map(len, hosts.values()), default=0))
    }
    assignments: dict[int, SlotInfo] = {}
    for host, on_host in hosts.items():
        for member in on_host:
            local_rank = local_ranks[member.number]
            assignments[member.number] = SlotInfo(
                hostname=host,
                rank=len(assignments),
                local_rank=local_rank,
                cross_rank=peers[local_rank][host],
                size=len(members),
                local_size=len(on_host),
                cross_size=len(peers[local_rank]),
            )
    return assignments
