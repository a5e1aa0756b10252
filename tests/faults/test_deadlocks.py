"""Jobs in which all ranks wait for each other end with an error, and no job ends in which a rank may still continue."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import horovod.torch as hvd
from horovod._base import config
from process_groups import run_in_group
from ranks import RankPool

Ranks = Callable[..., RankPool]

# Ranks are asked when a third of the timeout is over.
SOON = {config.DEADLOCK_TIME: "1", config.TIMEOUT_SECONDS: "3", config.FLIGHT_RECORDER_DIR: "/dev/null/none"}
LONG_SECONDS = 4.0


def generation(changes: dict[str, str], sets: list[list[int]], scene: Callable[..., None]) -> str:
    """Run a scene on a rank; the error that the job ended with, if it did."""
    env = {**SOON, **changes}
    os.environ.update(env)
    try:
        process_sets = [hvd.ProcessSet(ranks) for ranks in sets]
        hvd.init(process_sets=process_sets)
        scene(*process_sets)
        return ""
    except hvd.HorovodInternalError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        hvd.shutdown()
        for name in env:
            del os.environ[name]


def reduce(name: str, process_set: Any = hvd.global_process_set) -> None:
    hvd.allreduce(torch.ones(4), name=name, process_set=process_set)


def on_every_rank(pool: RankPool, scene: Callable[..., None], sets: Any = (), **changes: str) -> list[str]:
    return pool.run(generation, changes, [list(each) for each in sets], scene)


def assert_ended(texts: list[str], *parts: str) -> None:
    for text in texts:
        assert text.startswith("CollectiveTimeoutError: Horovod: rank "), text
        assert "No rank can continue" in text, text
        assert all(part in text for part in parts), text


def test_three_process_sets_in_a_circle(ranks: Ranks) -> None:
    def scene(a: Any, b: Any, c: Any) -> None:
        for each in ((c, a), (a, b), (b, c))[hvd.rank()]:
            reduce(f"on {each.ranks}", each)

    texts = on_every_rank(ranks(3, framework="torch"), scene, [[0, 1], [1, 2], [0, 2]])
    assert_ended(
        texts,
        "rank 0: allreduce.on [0, 2] (process set 3), submitted as allreduce(Average) float32 [4] at",
        "rank 2 has not called it",
        "rank 1: allreduce.on [0, 1] (process set 1)",
        "rank 2: allreduce.on [1, 2] (process set 2)",
    )


def test_a_rank_that_waits_for_another_name_while_pools_and_queues_are_idle(ranks: Ranks) -> None:
    def scene() -> None:
        with ThreadPoolExecutor(2) as pool:
            pool.submit(int).result()
            event = threading.Event()
            waiting = threading.Thread(target=event.wait, daemon=True)
            waiting.start()
            try:
                reduce("loss" if hvd.rank() else "metric")
            finally:
                event.set()
                waiting.join()

    assert_ended(
        on_every_rank(ranks(3, framework="torch"), scene),
        "rank 0: allreduce.metric, submitted",
        "ranks 1, 2: allreduce.loss, submitted",
    )


def test_without_a_flight_recorder(ranks: Ranks) -> None:
    def scene() -> None:
        for number in range(3):
            reduce(f"of all {number}")
        reduce(f"of {hvd.rank()}")

    texts = on_every_rank(ranks(3, framework="torch"), scene, **{config.FLIGHT_RECORDER_SIZE: "0"})
    assert_ended(texts, "rank 0: allreduce.of 0, submitted", "ranks 1, 2 have not called it")


def test_a_rank_that_has_joined_too_early(ranks: Ranks) -> None:
    def scene(pair: Any) -> None:
        if hvd.rank() == 1:
            hvd.join()
        reduce("of the pair", pair) if hvd.rank() < 2 else hvd.join()

    assert_ended(
        on_every_rank(ranks(3, framework="torch"), scene, [[0, 1]]),
        "rank 0: allreduce.of the pair (process set 1)",
        "ranks 1, 2: join",
    )


def test_two_threads_of_each_rank_wait_for_other_ranks(ranks: Ranks) -> None:
    def scene(pair: Any) -> None:
        def beside() -> None:
            try:
                reduce(f"beside {hvd.rank()}", pair)
            except hvd.HorovodInternalError:
                pass

        thread = threading.Thread(target=beside)
        thread.start()
        try:
            reduce(f"main {hvd.rank()}")
        finally:
            thread.join()

    assert_ended(on_every_rank(ranks(3, framework="torch"), _of_pair(scene), [[0, 1]]), "rank 0: allreduce.main 0")


def _of_pair(scene: Callable[..., None]) -> Callable[..., None]:
    def alone_or_not(pair: Any) -> None:
        if hvd.rank() < 2:
            scene(pair)
        else:
            reduce("main 2")

    return alone_or_not


def test_a_deadlock_is_left_to_the_stall_check_if_that_is_asked_for(ranks: Ranks) -> None:
    limits = {config.DEADLOCK_TIME: "0", config.STALL_CHECK_TIME: "1", config.STALL_SHUTDOWN_TIME: "4"}
    texts = on_every_rank(ranks(2, framework="torch"), lambda: reduce(f"of {hvd.rank()}"), **limits)
    assert all("stalled for longer than 4 seconds" in text and "No rank" not in text for text in texts), texts


def _all_names() -> None:
    """Submit what the other ranks wait for."""
    for rank in range(hvd.size()):
        if rank != hvd.rank():
            reduce(f"of {rank}")


def computes() -> None:
    if hvd.rank() == 1:
        end = time.monotonic() + LONG_SECONDS
        while time.monotonic() < end:
            sum(range(10000))
    reduce("late")


def sleeps_in_a_thread() -> None:
    """Both main threads wait for different names; a thread that has submitted nothing yet calls what is missing."""
    thread = threading.Thread(target=lambda: (time.sleep(LONG_SECONDS), _all_names()))
    thread.start()
    reduce(f"of {hvd.rank()}")
    thread.join()


def waits_with_a_limit() -> None:
    handle = hvd.allreduce_async(torch.ones(4), name=f"of {hvd.rank()}")
    end = time.monotonic() + LONG_SECONDS
    while time.monotonic() < end and not hvd.poll(handle):
        time.sleep(0.01)
    _all_names()
    hvd.synchronize(handle)


def is_fed_by_a_pipe() -> None:
    """A thread reads a pipe to which a process writes."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        time.sleep(LONG_SECONDS)
        os.write(target, b"x")
        os._exit(0)

    def read() -> None:
        os.read(source, 1)
        _all_names()

    thread = threading.Thread(target=read)
    thread.start()
    reduce(f"of {hvd.rank()}")
    thread.join()
    os.waitpid(child, 0)
    os.close(source)
    os.close(target)


@pytest.mark.parametrize("scene", [computes, sleeps_in_a_thread, waits_with_a_limit, is_fed_by_a_pipe])
def test_a_job_in_which_a_rank_can_continue_goes_on(ranks: Ranks, scene: Callable[[], None]) -> None:
    pool = ranks(2, framework="torch")
    assert on_every_rank(pool, scene) == ["", ""]
    told = scene in (sleeps_in_a_thread, is_fed_by_a_pipe)
    shown = pool.output(0)
    assert ("The job goes on, because these threads may still call it:" in shown) == told, shown


def test_a_rank_inside_tensorflow_can_continue(ranks: Ranks) -> None:
    def scene() -> None:
        import tensorflow as tf

        import horovod.tensorflow as tensorflow_hvd

        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            wait = tf.numpy_function(lambda: time.sleep(LONG_SECONDS * hvd.rank()) or 1.0, [], tf.double)
            with tf.control_dependencies([wait]):
                found = tensorflow_hvd.allreduce(tf.ones(2), name="in a session")
            assert session.run(found).tolist() == [1.0, 1.0]

    assert on_every_rank(ranks(2, framework="tensorflow"), scene) == ["", ""]


# torch.distributed


@pytest.fixture
def group(ranks: Ranks) -> Iterator[Callable[..., list[Any]]]:
    """Runs a scene on three ranks inside of a process group; the errors by rank."""
    pool = ranks(3, framework="torch")
    pool.run(_set)
    yield lambda scene: run_in_group(pool, _error_of, scene)
    pool.run(_forget)


def _set() -> None:
    os.environ.update(SOON)


def _forget() -> None:
    for name in SOON:
        os.environ.pop(name, None)


def _error_of(scene: Callable[[], None]) -> str:
    try:
        scene()
        return ""
    except hvd.HorovodInternalError as error:
        return f"{type(error).__name__}: {error}"


def test_groups_of_torch_distributed_in_a_circle(group: Callable[..., list[str]]) -> None:
    def scene() -> None:
        a, b, c = (dist.new_group(members) for members in ([0, 1], [1, 2], [0, 2]))
        for each in ((c, a), (a, b), (b, c))[dist.get_rank()]:
            dist.all_reduce(torch.ones(4), group=each)

    texts = group(scene)
    assert_ended(texts, "rank 2 has not called it", "rank 0 has not called it", "rank 1 has not called it")


def test_a_receive_without_a_send(group: Callable[..., list[str]]) -> None:
    def scene() -> None:
        tensor = torch.ones(4)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
        dist.all_reduce(tensor)

    assert_ended(group(scene), "rank 0: recv from rank 1 at", "rank 1 has not called it", "ranks 1, 2: ")


def test_a_send_to_a_rank_that_has_neither_sent_nor_received(group: Callable[..., list[str]]) -> None:
    def scene() -> None:
        tensor = torch.ones(4)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        dist.all_reduce(tensor)

    assert_ended(group(scene), "rank 0: send of 16 bytes to rank 1 at", "rank 1 has not called it", "ranks 1, 2: ")


def test_the_first_message_of_a_rank_that_comes_late_is_awaited(group: Callable[..., list[str]]) -> None:
    def scene() -> None:
        tensor = torch.ones(4)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            time.sleep(LONG_SECONDS)
            dist.recv(tensor, 0)
        dist.all_reduce(tensor)

    assert group(scene) == ["", "", ""]


def test_large_sends_before_the_receives(group: Callable[..., list[str]]) -> None:
    def scene() -> None:
        tensor, small = torch.ones(1 << 20), torch.ones(1)
        next_one, before = (dist.get_rank() + 1) % 3, (dist.get_rank() - 1) % 3
        dist.send(small, next_one)
        dist.recv(small, before)
        dist.send(tensor, next_one)
        dist.recv(tensor, before)

    assert_ended(group(scene), "rank 0: send of 4194304 bytes to rank 1 at", "rank 1 has not called it")


def test_messages_that_come_late_are_awaited(group: Callable[..., list[str]]) -> None:
    def scene() -> None:
        tensor = torch.ones(1 << 20)
        if dist.get_rank() == 0:
            time.sleep(LONG_SECONDS)
        for _ in range(3):
            work = dist.isend(tensor, (dist.get_rank() + 1) % 3)
            dist.recv(tensor, (dist.get_rank() - 1) % 3)
            work.wait()

    assert group(scene) == ["", "", ""]
