"""Tasks of Spark as ranks: grouped by host, and told apart from an earlier start of the same job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.hosts.slots import number_ranks
from horovod.runner.on_spark import grouping
from horovod.runner.on_spark.grouping import Attendance


def attendance(index: int, host: str = "a", **more: object) -> Attendance:
    given = {"attempt": index, "container": "", "addresses": ["10.0.0.1"], "port": 1, **more}
    return Attendance(index=index, host=host, **given)  # type: ignore[arg-type]


PLACES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "container_1", "container_2"])), min_size=1)


@given(PLACES, st.randoms())
def test_every_task_is_one_rank_and_those_of_a_host_are_consecutive(
    places: list[tuple[str, str]], random: object
) -> None:
    tasks = [attendance(index, host, container=container) for index, (host, container) in enumerate(places)]
    shuffled = list(tasks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    hosts = grouping.by_host(shuffled)
    in_order = [task for host in hosts for task in host.tasks]
    assert sorted(task.index for task in in_order) == list(range(len(places)))
    assert in_order[0].index == 0, "rank 0 is in the task of partition 0"
    assert len({host.name for host in hosts}) == len(hosts) == len(set(places))
    for host in hosts:
        assert len({(task.host, task.container) for task in host.tasks}) == 1
        assert [task.index for task in host.tasks] == sorted(task.index for task in host.tasks)
    slots = number_ranks([host.name for host in hosts for _ in host.tasks])
    assert [slot.local_rank for slot in slots] == [number for host in hosts for number in range(len(host.tasks))]


def test_a_host_has_the_gpus_of_all_of_its_tasks() -> None:
    hosts = grouping.by_host([attendance(0, gpus=["1"]), attendance(1, "b", gpus=["0"]), attendance(2, gpus=["0"])])
    assert [host.gpus for host in hosts] == [["1", "0"], ["0"]]


def test_messages_of_tasks_come_back_as_they_were() -> None:
    sent = attendance(3, "host", container="c", gpus=["0"], earlier=[1, 3])
    assert grouping.decode(grouping.encode(sent).decode()) == sent


@given(st.sets(st.integers(0, 20), min_size=1), st.sets(st.integers(0, 20)))
def test_tasks_are_a_second_start_if_an_executor_remembers_others(now: set[int], before: set[int]) -> None:
    tasks = [attendance(index, attempt=attempt, earlier=sorted(before)) for index, attempt in enumerate(sorted(now))]
    assert grouping.was_started_before(tasks) == bool(before - now)
