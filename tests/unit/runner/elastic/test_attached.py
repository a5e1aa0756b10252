"""An elastic job whose processes something else starts: each is a host, and comes whether it is needed or not."""

from __future__ import annotations

from elastic_policy_world import PolicyWorld
from horovod.control.elastic_messages import HostUpdateResult
from horovod.runner.agent.messages import Exit
from horovod.runner.hosts.slots import HostInfo

NODES = {"w0": "n0", "w1": "n0", "w2": "n1", "w3": "n1"}


def hosts(*names: str, at: dict[str, int] | None = None) -> list[HostInfo]:
    """Workers, each with its number; a replacement has the number of the worker that it replaces."""
    numbers = {name: int(name[1]) for name in names} | (at or {})
    return [HostInfo(name, 1, machine=NODES[f"w{numbers[name]}"], first_slot=numbers[name]) for name in names]


def world_of_four() -> PolicyWorld:
    world = PolicyWorld({}, least=1, most=4, start=4, attached=True)
    world.do(world.policy.hosts_found(hosts("w0", "w1", "w2", "w3")))
    world.begin()
    return world


def test_workers_of_a_node_are_local_to_each_other() -> None:
    world = world_of_four()
    slots = [world.assignments[number] for number in world.ranks()]
    assert [(slot.hostname, slot.local_rank, slot.local_size, slot.cross_rank) for slot in slots] == [
        ("n0", 0, 2, 0), ("n0", 1, 2, 0), ("n1", 0, 2, 1), ("n1", 1, 2, 1),
    ]  # fmt: skip


def test_a_replacement_joins_the_survivors_with_the_local_rank_of_the_lost_one() -> None:
    world = world_of_four()
    world.end(0)
    world.ready(1, 2, 3, failed=True)
    assert world.ranks() == [1, 2, 3]
    world.connect()
    world.do(world.policy.hosts_found(hosts("w0", "w1", "w2", "w3", "r0", at={"r0": 0})))
    assert world.alive[4] == "r0"
    world.ready(4)
    assert world.announced == HostUpdateResult.added
    world.ready(1, 2, 3, keep=True)
    assert {number: world.assignments[number].local_rank for number in world.assignments} == {1: 1, 2: 0, 3: 1, 4: 0}
    assert world.assignments[1].rank == 0


def test_a_worker_is_a_rank_once() -> None:
    world = world_of_four()
    world.end(3, Exit(0))
    world.end(2, Exit(0))
    assert sorted(world.alive) == [0, 1]


def test_a_worker_that_comes_when_others_have_finished_ends_well() -> None:
    world = world_of_four()
    world.end(0, Exit(0))
    world.do(world.policy.hosts_found(hosts("w0", "w1", "w2", "w3", "r1", at={"r1": 1})))
    assert world.alive[4] == "r1"
    world.ready(4)
    assert world.dismissed == {4: False}
    world.end(4, Exit(0))
    for number in (1, 2, 3):
        world.end(number, Exit(0))
    assert not world.policy.undecided and world.policy.first_failure is None and not world.policy.stopped
