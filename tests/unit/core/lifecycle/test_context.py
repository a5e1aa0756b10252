"""The life of the runtime: a job of one in this process, and small jobs whose ranks are threads."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from horovod._base import config
from horovod._base.config import Config
from horovod._base.process_identity import HostList, ProcessIdentity, Rank0
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.comm.select import EngineError
from horovod.common import basics
from horovod.control.rendezvous import munge
from horovod.control.rendezvous.at_rank_0 import RendezvousAtRank0
from horovod.control.rendezvous.on_hosts import RendezvousOnHosts
from horovod.control.rendezvous.rendezvous_kinds import LauncherServer, OnThisHost, Rendezvous
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import encode_secret, make_secret, secret_of_text
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import context
from horovod.core.lifecycle.generation import Generation
from horovod.core.lifecycle.initial_process_sets import RequestedSet
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set, membership
from horovod.core.lifecycle.rendezvous import rendezvous_of
from horovod.core.lifecycle.termination import FAILURE_KEY
from horovod.core.lifecycle.world import World, choose
from horovod.core.negotiation.messages import Operation, Request, TensorSpec
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives
from leaks import Inventory
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, run_concurrently, wait_until

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SECONDS = SOON
TOPOLOGY: list[Callable[[], object]] = [
    basics.size,
    basics.rank,
    basics.local_size,
    basics.local_rank,
    basics.cross_size,
    basics.cross_rank,
    basics.is_homogeneous,
]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables, no exception of an earlier test, and nothing running at the end."""
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "_HOROVOD_")):
            monkeypatch.delenv(name)
    for name in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)
    assert not context.is_initialized()
    yield
    context.shutdown()
    membership.clear()


def tensor(*values: float) -> Tensor:
    array = np.array(values, np.float32)
    return Tensor(array, DataType.FLOAT32, array.shape)


def calls() -> dict[str, Callable[[], Handle]]:
    """Every collective, on small tensors."""
    one = tensor(1, 2)

    def allocate(index: int, rows: int) -> Any:
        return np.zeros(rows, np.float32)

    return {
        "Allreduce": lambda: collectives.allreduce("test", "a", [one], [one]),
        "Allgather": lambda: collectives.allgather("test", "b", [one], allocate),
        "Broadcast": lambda: collectives.broadcast("test", "c", [one], 0),
        "Alltoall": lambda: collectives.alltoall("test", "d", one, None, allocate),
        "Reducescatter": lambda: collectives.reducescatter("test", "e", [one], [tensor(0, 0)]),
        "Barrier": collectives.barrier,
        "Join": collectives.join,
    }


# A job of one


def test_a_job_of_one_needs_no_launcher_and_knows_its_place() -> None:
    basics.init()
    assert context.is_initialized()
    assert [question() for question in TOPOLOGY] == [1, 0, 1, 0, 1, 0, True]
    assert global_process_set.ranks == [0]
    assert (global_process_set.size(), global_process_set.rank(), global_process_set.included()) == (1, 0, True)


def open_descriptors() -> dict[int, str]:
    return Inventory.take().descriptors


def test_a_job_of_one_opens_no_connection() -> None:
    before = open_descriptors()
    basics.init()
    opened = {number: target for number, target in open_descriptors().items() if before.get(number) != target}
    assert opened
    assert not any(target.startswith("socket:") for target in opened.values())


def test_every_collective_of_a_job_of_one() -> None:
    basics.init()
    for name, call in calls().items():
        call().wait(SECONDS)
        assert name


def test_two_hundred_lives_leave_nothing_behind() -> None:
    def count() -> tuple[int, int]:
        return threading.active_count(), len(open_descriptors())

    basics.init()
    context.shutdown()
    gc.collect()
    before = count()
    for number in range(200):
        basics.init()
        one = tensor(number)
        handle = collectives.allreduce("test", "x", [one], [one], ReduceOp.SUM)
        handle.wait(SECONDS)
        context.shutdown()
    assert count() == before


def test_a_second_init_changes_nothing() -> None:
    basics.init()
    running = context.current()
    basics.init()
    assert context.current() is running


def test_shutdown_when_nothing_runs() -> None:
    context.shutdown()
    basics.init()
    context.shutdown()
    context.shutdown()
    assert not context.is_initialized()


def test_lives_are_numbered() -> None:
    basics.init()
    first = context.current().generation
    context.shutdown()
    basics.init()
    assert context.current().generation == first + 1


@pytest.mark.parametrize("question", TOPOLOGY)
def test_topology_before_init_and_after_shutdown(question: Callable[[], object]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            question()
        assert str(caught.value) == NOT_INITIALIZED
        basics.init()
        context.shutdown()


@pytest.mark.parametrize("name", calls())
def test_operations_before_init_and_after_shutdown(name: str) -> None:
    for _ in range(2):
        with pytest.raises(HorovodInternalError) as caught:
            calls()[name]()
        assert str(caught.value) == NOT_INITIALIZED
        basics.init()
        context.shutdown()


def test_what_is_pending_at_shutdown_fails() -> None:
    basics.init()
    worker = context.current().workers[0]
    handle = Handle()
    worker.submit(Entry(Request(Operation.ALLREDUCE, "pending"), [], [], None, handle, time.monotonic()), held=True)
    context.shutdown()
    with pytest.raises(HorovodInternalError, match="Horovod has been shut down"):
        handle.wait(SECONDS)


def test_settings_are_read_at_every_init(monkeypatch: pytest.MonkeyPatch) -> None:
    basics.init()
    assert context.current().config == Config()
    context.shutdown()
    monkeypatch.setenv(config.CACHE_CAPACITY, "5")
    basics.init()
    assert context.current().config.cache_capacity == 5


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        (config.CACHE_CAPACITY, "lots", ValueError),
        (config.CPU_OPERATIONS, "carrier-pigeon", EngineError),
        (config.RANK, "zero", ValueError),
    ],
)
def test_a_bad_environment_fails_init_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: type[Exception]
) -> None:
    if variable == config.RANK:
        monkeypatch.setenv(config.SIZE, "1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(error, match=value):
        basics.init()
    assert not context.is_initialized()
    monkeypatch.delenv(variable)
    monkeypatch.delenv(config.SIZE, raising=False)
    basics.init()
    calls()["Allreduce"]().wait(SECONDS)


# Arguments


def test_an_unknown_process_set_and_one_this_rank_is_not_in() -> None:
    basics.init()
    membership.ranks[4] = [1, 2]
    one = tensor(1)
    for number, text in [
        (9, "{}: Process set provided does not exist, or has not been registered."),
        (None, "{}: Process set provided does not exist, or has not been registered."),
        (4, "{}: Rank 0 is not a member of the provided process set."),
    ]:
        attempts: dict[str, Callable[[], object]] = {
            "Allreduce": partial(collectives.allreduce, "test", "a", [one], [one], process_set_id=number),
            "Broadcast": partial(collectives.broadcast, "test", "a", [one], 0, process_set_id=number),
            "Alltoall": partial(
                collectives.alltoall, "test", "a", one, None, lambda _, rows: one.array, process_set_id=number
            ),
            "Barrier": partial(collectives.barrier, number),
        }
        for name, attempt in attempts.items():
            with pytest.raises(ValueError) as caught:
                attempt()
            assert str(caught.value) == text.format(name)


def test_a_root_outside_the_set() -> None:
    basics.init()
    with pytest.raises(ValueError, match="broadcast received invalid root rank 1 for provided process set"):
        collectives.broadcast("test", "a", [tensor(1)], 1)


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        ([1, 1], "Number of entries in splits does not equal number of workers."),
        ([3], "Sum of splits entries is greater than the first dimension of tensor."),
        ([-1], "must not be negative"),
    ],
)
def test_splits_that_do_not_add_up(splits: list[int], text: str) -> None:
    basics.init()
    with pytest.raises(ValueError, match=text):
        collectives.alltoall("test", "a", tensor(1, 2), splits, lambda _, rows: np.zeros(rows, np.float32))


def test_a_scalar_cannot_be_scattered_and_a_maximum_neither() -> None:
    basics.init()
    scalar = Tensor(np.ones(1, np.float32), DataType.FLOAT32, ())
    with pytest.raises(ValueError, match="Reducescatter does not support scalar inputs"):
        collectives.reducescatter("test", "a", [scalar], [scalar])
    with pytest.raises(HorovodInternalError, match="Reducescatter currently only supports AVERAGE and SUM"):
        collectives.reducescatter("test", "a", [tensor(1)], [tensor(1)], ReduceOp.MAX)


def test_truth_values_have_no_average() -> None:
    basics.init()
    flags = Tensor(np.ones(2, np.bool_), DataType.BOOL, (2,))
    with pytest.raises(ValueError, match="elements of type bool cannot be averaged or scaled"):
        collectives.allreduce("test", "a", [flags], [flags])
    collectives.allreduce("test", "a", [flags], [flags], ReduceOp.SUM).wait(SECONDS)


def test_names_for_calls_that_have_none_are_counted_per_kind() -> None:
    basics.init()
    worker = context.current().workers[0]
    calls = [
        collectives.prepared_call(Operation.ALLREDUCE, prefix, None, [tensor(1)]).request
        for prefix in ("allreduce", "allreduce", "broadcast")
    ]
    names = [worker.number(call).name for call in calls]
    assert names == ["allreduce.noname.1", "allreduce.noname.2", "broadcast.noname.1"]


# Process sets of a job of one


def test_a_set_that_is_the_global_one_is_a_duplicate_and_the_job_runs() -> None:
    one = ProcessSet([0])
    with pytest.raises(ValueError) as caught:
        basics.init(process_sets=[one])
    assert str(caught.value).startswith(
        "Horovod could not be initialized because process_sets entry number 0 is a duplicate"
    )
    assert one.process_set_id is None
    assert context.is_initialized()
    basics.init(process_sets=[])
    calls()["Barrier"]().wait(SECONDS)


@pytest.mark.parametrize(("ranks", "text"), [([1], "rank 1"), ([-1, 0], "rank -1"), ([0, 0], "twice"), ([], "none")])
def test_a_set_that_cannot_be_is_refused_and_nothing_runs(ranks: list[int], text: str) -> None:
    with pytest.raises(ValueError, match="Horovod initialization failed") as caught:
        basics.init(process_sets=[ProcessSet(ranks)])
    assert text in str(caught.value)
    assert not context.is_initialized()


def test_a_later_init_looks_sets_up() -> None:
    basics.init()
    same = ProcessSet([0])
    basics.init(process_sets=[same])
    assert same.process_set_id == 0
    with pytest.raises(KeyError):
        basics.init(process_sets=[ProcessSet([5])])


# Fork


def in_child(function: Callable[[], Any]) -> Any:
    """What ``function`` returns in a forked child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            os.write(write, json.dumps(function()).encode())
            status = 0
        except BaseException as error:
            os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def raised_by(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def test_a_forked_child_knows_its_place_and_cannot_communicate() -> None:
    basics.init()
    inherited = context.current().workers[0].descriptors()

    def child() -> list[Any]:
        still_open = [descriptor for descriptor in inherited if descriptor in open_descriptors()]
        found = [raised_by(call) for call in calls().values()]
        return [basics.rank(), basics.size(), context.is_initialized(), still_open, found]

    rank, size, initialized, still_open, found = in_child(child)
    assert (rank, size, initialized, still_open) == (0, 1, True, [])
    for name, text in found:
        assert name == "HorovodInternalError"
        assert "forked from rank 0" in text
    calls()["Allreduce"]().wait(SECONDS)


def test_what_a_forked_child_does_to_its_copy_does_not_reach_the_parent() -> None:
    basics.init()

    def child() -> list[Any]:
        context.shutdown()
        after = context.is_initialized()
        basics.init()
        calls()["Allreduce"]().wait(SECONDS)
        alive = threading.active_count()
        context.shutdown()
        return [after, alive]

    assert in_child(child) == [False, 3]
    calls()["Allreduce"]().wait(SECONDS)


def test_a_fork_while_nothing_runs() -> None:
    basics.init()
    context.shutdown()
    assert in_child(lambda: [context.is_initialized()]) == [False]


# Jobs whose ranks are threads


def identity(rank: int, size: int, job: str) -> ProcessIdentity:
    return ProcessIdentity(rank, size, rank, size, 0, 1, "this-host", "a test", f"{os.getpid()} {job}")


def member(rank: int, size: int, job: str, settings: Config | None = None, generation: int = 1) -> Generation:
    """Rank ``rank``'s view of a job's generation, not started."""
    who = identity(rank, size, job)
    return Generation(World(who, who), settings or Config(), generation - 1, calls=generation)


class Job:
    """Ranks that each have a context of their own in this one process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stack = ExitStack()

    def contexts(self, size: int, settings: Config | None = None, generation: int = 1) -> list[Generation]:
        return [member(rank, size, self._name, settings or Config(), generation) for rank in range(size)]

    def start(
        self, size: int, sets: list[list[int]] | None = None, settings: Config | None = None, generation: int = 1
    ) -> list[Generation]:
        made = self.contexts(size, settings, generation)
        run_concurrently(*(partial(each.start, [RequestedSet(tuple(ranks)) for ranks in sets or []]) for each in made))
        return made


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Job:
    return Job(request.node.name)


def stop(contexts: list[Generation]) -> None:
    run_concurrently(*(each.stop for each in contexts))


def submit(each: Generation, name: str, value: float, process_set: int = 0) -> tuple[Handle, Any]:
    array, handle = np.full(3, value, np.float32), Handle()
    spec = (TensorSpec(name, DataType.FLOAT32, (3,)),)
    request = Request(Operation.ALLREDUCE, name, spec, ReduceOp.SUM)
    each.workers[process_set].submit(Entry(request, [array], [array], None, handle, time.monotonic()))
    return handle, array


def total(contexts: list[Generation], name: str = "x", process_set: int = 0) -> list[float]:
    """The sum of 1, 2, ... over the ranks, as each of them sees it."""
    found = [submit(each, name, number, process_set) for number, each in enumerate(contexts, 1)]
    for handle, _ in found:
        handle.wait(SECONDS)
    return [float(array[0]) for _, array in found]


@pytest.mark.parametrize("engine", ["", "shm", "tcp"])
def test_ranks_meet_reduce_and_part(job: Job, engine: str) -> None:
    for generation in (1, 2, 3):
        contexts = job.start(3, settings=Config(cpu_operations=engine), generation=generation)
        names = {each.workers[0].communicator.name for each in contexts}
        assert names == {engine or "shm"}
        assert total(contexts) == [6, 6, 6]
        assert [each.is_homogeneous() for each in contexts] == [True] * 3
        stop(contexts)
        assert [str(each.stopped).startswith("Horovod has been shut down.") for each in contexts] == [True] * 3


def test_sets_of_ranks_have_workers_of_their_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = job.start(3, [[0, 2], [1], [1, 2]])
    assert [sorted(each.workers) for each in contexts] == [[0, 1], [0, 2, 3], [0, 1, 3]]
    assert total([contexts[0], contexts[2]], process_set=1) == [3, 3]
    assert total([contexts[1]], process_set=2) == [1]
    assert total([contexts[1], contexts[2]], process_set=3) == [3, 3]
    assert total(contexts) == [6, 6, 6]
    membership.rank = 1
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="Rank 1 is not a member"):
        patch.setattr(context, "_running", contexts[1])
        context.worker_of(1, Operation.ALLREDUCE)
    stop(contexts)


def test_ranks_that_were_given_different_sets(job: Job) -> None:
    contexts = job.contexts(2)
    outcomes = ConcurrentCalls(
        *(partial(each.start, [RequestedSet((rank,))]) for rank, each in enumerate(contexts))
    ).outcomes()
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, ValueError)
        assert str(outcome).startswith("Horovod initialization failed: the ranks were given different process sets.")
        assert f"rank {1 - rank} has" in str(outcome)
    for each in contexts:
        each.discard()


def test_a_rank_that_does_not_come_is_named(job: Job) -> None:
    contexts = job.contexts(3, Config.from_env({config.START_TIMEOUT: "1"}))
    outcomes = ConcurrentCalls(partial(contexts[0].start, [])).outcomes()
    assert isinstance(outcomes[0], TimeoutError)
    assert "ranks 1, 2 of 3 did not call hvd.init() within" in str(outcomes[0])
    contexts[0].discard()


def test_an_engine_that_one_rank_forces_and_another_forbids(job: Job) -> None:
    contexts = [member(rank, 2, "forced", Config(cpu_operations=engine)) for rank, engine in enumerate(["shm", "tcp"])]
    outcomes = ConcurrentCalls(*(partial(each.start, []) for each in contexts)).outcomes()
    for outcome in outcomes:
        assert isinstance(outcome, EngineError)
        assert f"different engines with {config.CPU_OPERATIONS}: shm on rank 0, tcp on rank 1" in str(outcome)
    for each in contexts:
        each.discard()


def test_a_rank_that_leaves_ends_the_job_for_all_and_is_named(job: Job) -> None:
    contexts = job.start(3)
    waiting = [submit(contexts[rank], "x", 1)[0] for rank in (0, 2)]
    leaving = ConcurrentCalls(contexts[1].stop)
    for handle in waiting:
        with pytest.raises(HorovodInternalError, match=r"Horovod has been shut down\. This was caused by rank 1"):
            handle.wait(SECONDS)
    leaving.results()
    stop([contexts[0], contexts[2]])


def test_a_failure_is_told_to_all_pending_and_later_calls(job: Job) -> None:
    contexts = job.start(3)
    waiting = [submit(contexts[rank], "x", 1)[0] for rank in (0, 2)]
    contexts[1].watch.report(1, "it ran out of memory")
    text = f"Horovod: rank 1 (host this-host, process {os.getpid()}) failed: it ran out of memory."
    for handle in waiting:
        with pytest.raises(HorovodInternalError) as caught:
            handle.wait(SECONDS)
        assert str(caught.value).startswith(text)
    for each in contexts:
        wait_until(lambda each=each: each.stopped, "the failure")
        with pytest.raises(HorovodInternalError, match="it ran out of memory"):
            submit(each, "y", 1)
    stop(contexts)


def test_an_uncaught_exception_is_what_the_others_are_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = job.start(2)
    handle, _ = submit(contexts[1], "x", 1)
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        monkeypatch.setattr(sys, "last_exc" if sys.version_info >= (3, 12) else "last_value", error, raising=False)
    leaving = ConcurrentCalls(contexts[0].stop)
    with pytest.raises(HorovodInternalError) as caught:
        handle.wait(SECONDS)
    assert "rank 0" in str(caught.value)
    assert "it raised ZeroDivisionError: division by zero (at " in str(caught.value)
    assert "test_context.py" in str(caught.value)
    leaving.results()
    stop([contexts[1]])


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_twenty_generations_leave_nothing_behind(job: Job, engine: str) -> None:
    for generation in range(1, 21):
        contexts = job.start(2, settings=Config(cpu_operations=engine), generation=generation)
        assert total(contexts) == [3, 3]
        stop(contexts)


# How ranks find each other


def rendezvous_point(launched: ProcessIdentity, env: Mapping[str, str]) -> Rendezvous:
    return rendezvous_of(choose(None, launched), env)


def test_the_launchers_place_and_its_secret() -> None:
    secret = make_secret()
    env = {
        config.RENDEZVOUS_ADDRESS: "10.0.0.1",
        config.RENDEZVOUS_PORT: "4711",
        config.SECRET_KEY: encode_secret(secret),
    }
    rendezvous = rendezvous_point(identity(0, 2, "x"), env)
    assert rendezvous == LauncherServer(("10.0.0.1", 4711), secret)


def test_ranks_that_were_told_by_hand_where_to_meet_need_a_secret() -> None:
    env = {config.RENDEZVOUS_ADDRESS: "10.0.0.1", config.RENDEZVOUS_PORT: "4711"}
    by_hand = ProcessIdentity(0, 2, 0, 1, 0, 1, "host", "horovodrun", "", local_ranks_known=False)
    with pytest.raises(
        ValueError, match=f"neither {config.SECRET_KEY}.*nor {config.USER_SECRET}.*openssl rand -hex 16"
    ):
        rendezvous_point(by_hand, env)
    with pytest.raises(ValueError, match=f"{config.USER_SECRET}: expected at least 16 characters") as caught:
        rendezvous_point(by_hand, {**env, config.USER_SECRET: "too short"})
    assert "too short" not in str(caught.value)
    rendezvous = rendezvous_point(by_hand, {**env, config.USER_SECRET: "a long text of one's own"})
    assert isinstance(rendezvous, RendezvousAtRank0)
    assert rendezvous.secret == secret_of_text("a long text of one's own")


@pytest.mark.parametrize("port", ["0", "70000", "http"])
def test_a_meeting_at_a_port_that_is_none(port: str) -> None:
    with pytest.raises(ValueError, match=f"{config.RENDEZVOUS_PORT}='{port}': expected the number of a port"):
        rendezvous_point(identity(0, 2, "x"), {config.RENDEZVOUS_ADDRESS: "a", config.RENDEZVOUS_PORT: port})


def test_a_launcher_that_says_where_rank_0_is_needs_nothing_else() -> None:
    who = ProcessIdentity(
        1, 2, 0, 1, 0, 1, "host", "a PyTorchJob", "", local_ranks_known=False, rank_0=Rank0("master", 23456)
    )
    rendezvous = rendezvous_point(who, {})
    assert isinstance(rendezvous, RendezvousAtRank0)
    assert (rendezvous.address, rendezvous.secret) == ("master:23456 (MASTER_ADDR, MASTER_PORT)", b"")
    moved = rendezvous_point(who, {config.RENDEZVOUS_PORT: "4000"})
    assert isinstance(moved, RendezvousAtRank0)
    assert moved.address == f"master:4000 (MASTER_ADDR, {config.RENDEZVOUS_PORT})"


def test_a_place_of_their_own_for_ranks_of_one_host() -> None:
    one = identity(0, 2, "x")
    assert rendezvous_point(one, {}) == OnThisHost.of_job(one.job)


def test_ranks_of_several_hosts_need_a_place() -> None:
    spread = ProcessIdentity(0, 4, 0, 2, 0, 2, "host", "Slurm", "job 7")
    with pytest.raises(
        ValueError,
        match=r"Slurm started 4 ranks on several hosts .* start the job with horovodrun, or pass an mpi4py",
    ):
        rendezvous_point(spread, {})


NODES = HostList(("n1", "n2"), "n1", ())


def test_ranks_of_srun_meet_on_the_first_node_by_the_users_secret() -> None:
    spread = ProcessIdentity(2, 4, 0, 2, 1, 2, "n2", "slurm", "slurm/7/0/", hosts=NODES)
    rendezvous = rendezvous_point(spread, {config.SECRET_KEY: encode_secret(make_secret())})
    assert isinstance(rendezvous, RendezvousOnHosts)
    assert isinstance(rendezvous.address, tuple) and rendezvous.address[0] == "n1"


def test_without_munge_and_a_secret_ranks_of_srun_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(munge.ctypes, "CDLL", mock.Mock(side_effect=OSError("cannot open it")))
    spread = ProcessIdentity(2, 4, 0, 2, 1, 2, "n2", "slurm", "slurm/7/0/", hosts=NODES)
    with pytest.raises(
        ValueError, match=f"slurm started 4 ranks .* MUNGE cannot be used here.*export {config.USER_SECRET}="
    ):
        rendezvous_point(spread, {})


def test_the_launcher_learns_who_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = make_secret()
    server = RendezvousServer(secret)
    server.start()
    try:
        monkeypatch.setenv(config.RENDEZVOUS_ADDRESS, server.address[0])
        monkeypatch.setenv(config.RENDEZVOUS_PORT, str(server.address[1]))
        monkeypatch.setenv(config.SECRET_KEY, encode_secret(secret))
        contexts = [member(rank, 2, "") for rank in range(2)]
        run_concurrently(*(partial(each.start, []) for each in contexts))
        assert total(contexts) == [3, 3]
        assert server.peek(FAILURE_KEY) is None
        contexts[1].watch.report(1, "it fell over")
        found = json.loads(server.get(FAILURE_KEY, SECONDS))
        assert found == {"rank": 1, "reason": "it fell over", "own": False}
        for each in contexts:
            wait_until(lambda each=each: each.stopped, "the failure")
        stop(contexts)
    finally:
        server.stop()


@pytest.mark.parametrize("no", ["0", "false", "No", "off", ""])
def test_a_log_that_is_not_to_hide_the_time_shows_it(
    no: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(config.LOG_HIDE_TIME, no)
    basics.init()
    logging.getLogger("horovod.core").warning("hello")
    assert not capsys.readouterr().err.startswith("[W ")


def test_the_log_is_set_up_at_init(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(config.LOG_LEVEL, "info")
    monkeypatch.setenv(config.LOG_HIDE_TIME, "1")
    basics.init()
    logging.getLogger("horovod.core").info("hello")
    summary, hello = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"\[I generation.py:\d+\] \[0\]: 1 rank on 1 host \(.*: 1\); host memory travels by single", summary
    )
    assert hello.startswith("[I test_context.py:")
    monkeypatch.setenv(config.LOG_LEVEL, "warning")
    context.shutdown()
    basics.init()


def test_shared_memory_is_given_back_at_shutdown(job: Job) -> None:
    """At once, without the help of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        for generation in range(1, 6):
            contexts = job.start(2, generation=generation)
            total(contexts)
            stop(contexts)
        left = [t for t in open_descriptors().values() if "memfd:horovod" in t]
    finally:
        gc.enable()
        gc.collect()
    assert left == []


def test_a_grandchild_cannot_communicate_either():
    """And what it opened since is left alone: the numbers of the parent's connections belong to others by then."""
    basics.init()
    assert in_child(lambda: in_child(lambda: raised_by(collectives.barrier)))[0] == "HorovodInternalError"


def test_a_forked_child_holds_no_connection_of_the_tcp_engine():
    contexts = [member(rank, 2, "hold", Config(cpu_operations="tcp")) for rank in range(2)]
    basics.init()
    context.shutdown()
    before = connected_sockets()
    run_concurrently(*(partial(each.start, []) for each in contexts))
    ends = sorted(set(connected_sockets()) - set(before))  # both ends of each connection are in this process
    assert contexts[0].workers[0].communicator.name == "tcp" and len(ends) >= 4
    context._running = contexts[0]
    try:
        left = in_child(lambda: [fd for fd in ends if Path(f"/proc/self/fd/{fd}").exists()])
        assert len(left) == len(ends) // 2  # rank 1's
    finally:
        context._running = None
        stop(contexts)


def connected_sockets():
    found = []
    for number, target in Inventory.take().descriptors.items():
        if target.startswith("socket:"):
            with socket.socket(fileno=os.dup(number)) as copy, suppress(OSError):
                copy.getpeername()
                found.append(number)
    return found


def test_a_port_that_is_none():
    env = {config.RENDEZVOUS_ADDRESS: "h", config.RENDEZVOUS_PORT: "abc", config.SECRET_KEY: "AAAA"}
    with pytest.raises(ValueError) as caught:
        rendezvous_point(identity(0, 2, "x"), env)
    assert config.RENDEZVOUS_PORT in str(caught.value) and "'abc'" in str(caught.value)
