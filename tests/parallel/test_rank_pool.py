"""The pool of rank processes itself: what later tests rely on when they say what happened in a rank."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from horovod._base import config
from leaks import Inventory, left_behind
from ranks import Death, RankError, RankPool, RankTimeout
from time_limits import SOON

GREETING = "hello"

Ranks = Callable[..., RankPool]


def greet(name: str) -> str:
    return f"{GREETING} {name} from {os.environ[config.RANK]}"


def test_results_by_rank(ranks: Ranks) -> None:
    pool = ranks(3)
    assert pool.run(greet, "you") == [f"hello you from {rank}" for rank in range(3)]
    assert pool.run(lambda: 7) == [7, 7, 7]
    assert pool.run(greet, "you", ranks=[2, 0]) == ["hello you from 2", "hello you from 0"]


def test_the_environment_of_a_job(ranks: Ranks) -> None:
    found = ranks(2).run(lambda: dict(os.environ))
    for rank, env in enumerate(found):
        assert (env[config.RANK], env[config.SIZE]) == (str(rank), "2")
        assert (env[config.LOCAL_RANK], env[config.LOCAL_SIZE]) == (str(rank), "2")
        assert (env[config.CROSS_RANK], env[config.CROSS_SIZE]) == ("0", "1")
        assert (env[config.HOSTNAME], env[config.RENDEZVOUS_ADDRESS]) == ("localhost", "127.0.0.1")
        assert env["OMP_NUM_THREADS"] == "1"
    assert found[0][config.SECRET_KEY] == found[1][config.SECRET_KEY] != ""
    assert found[0][config.RENDEZVOUS_PORT] == found[1][config.RENDEZVOUS_PORT]


def test_the_server_that_ranks_meet_at_is_there(ranks: Ranks) -> None:
    import socket

    def reach() -> None:
        address = os.environ[config.RENDEZVOUS_ADDRESS], int(os.environ[config.RENDEZVOUS_PORT])
        socket.create_connection(address, timeout=5).close()

    ranks(2).run(reach)


def test_more_environment(ranks: Ranks) -> None:
    pool = ranks(1, env={"HOROVOD_CYCLE_TIME": "3"})
    assert pool.run(os.getenv, "HOROVOD_CYCLE_TIME") == ["3"]
    assert ranks(1, env={"HOROVOD_CYCLE_TIME": "3"}) is pool
    assert ranks(1) is not pool


def test_functions_run_in_the_main_thread_of_the_same_process(ranks: Ranks) -> None:
    def where() -> tuple[int, bool]:
        return os.getpid(), threading.current_thread() is threading.main_thread()

    first = ranks(2).run(where)
    assert all(main for _, main in first)
    assert ranks(2).run(where) == first


def test_a_large_result(ranks: Ranks) -> None:
    assert [len(data) for data in ranks(2).run(lambda: bytes(20 << 20))] == [20 << 20] * 2


def test_exceptions_show_every_ranks_traceback(ranks: Ranks) -> None:
    def fail() -> None:
        print(f"about to fail on {os.environ[config.RANK]}")
        if os.environ[config.RANK] != "1":
            raise KeyError(f"key of {os.environ[config.RANK]}")

    pool = ranks(3)
    with pytest.raises(RankError) as failure:
        pool.run(fail)
    message = str(failure.value)
    assert "ranks [0, 2] of 3 failed" in message
    assert "KeyError: 'key of 0'" in message and "KeyError: 'key of 2'" in message
    assert "test_rank_pool.py" in message and "about to fail on 2" in message
    assert isinstance(failure.value.errors[0], KeyError) and list(failure.value.errors) == [0, 2]
    assert pool.run(lambda: "still there") == ["still there"] * 3


def test_exceptions_that_cannot_be_pickled(ranks: Ranks) -> None:
    def fail() -> None:
        error = RuntimeError("odd one")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(RankError, match="RuntimeError: odd one") as failure:
        ranks(1).run(fail)
    assert failure.value.errors == {0: None}


def test_results_that_cannot_be_pickled(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="pickle"):
        ranks(1).run(threading.Lock)


def test_leaving_the_interpreter_is_an_error_like_others(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        ranks(1).run(sys.exit, 3)


def test_a_timeout_shows_stacks_and_restarts(ranks: Ranks) -> None:
    def hang_on_rank_1() -> None:
        while os.environ[config.RANK] == "1":
            time.sleep(0.01)

    pool = ranks(2)
    before = pool.run(os.getpid)
    with pytest.raises(RankTimeout) as failure:
        pool.run(hang_on_rank_1, timeout=0.5)
    message = str(failure.value)
    assert "ranks [1] did not finish within 0.5 seconds" in message
    assert "rank 0 had finished" in message
    assert "in hang_on_rank_1" in message
    assert not pool.alive(0) and not any(psutil.pid_exists(pid) for pid in before)
    after = pool.run(os.getpid)
    assert not set(after) & set(before)


def test_expected_deaths(ranks: Ranks) -> None:
    def die_on_rank_1() -> str:
        if os.environ[config.RANK] == "1":
            os._exit(9)
        return "survived"

    assert ranks(3).run(die_on_rank_1, dies={1}) == ["survived", Death(9), "survived"]
    with pytest.raises(RankError, match="rank 1 was to end, but returned 'survived'"):
        ranks(3).run(lambda: "survived", dies={1})


def test_unexpected_deaths(ranks: Ranks) -> None:
    pool = ranks(2)
    with pytest.raises(RankError, match="rank 0 ended with signal SIGABRT") as failure:
        pool.run(os.abort, ranks=[0])
    assert failure.value.errors == {0: Death(-signal.SIGABRT)}
    assert pool.alive(1) and not pool.alive(0) and not pool.healthy()
    with pytest.raises(RankError, match="rank 0 ended"):
        pool.run(os.getpid)
    assert ranks(2) is pool and pool.healthy()


def test_signals_in_the_middle_of_a_call(ranks: Ranks) -> None:
    pool = ranks(2)
    call = pool.start(time.sleep, 0.5)
    pool.kill(1)
    assert call.results(dies={1}) == [None, Death(-signal.SIGKILL)]
    pool.restart()
    call = pool.start(time.sleep, 0.1)
    pool.kill(1, signal.SIGSTOP)
    with pytest.raises(RankTimeout, match="rank 1 is stopped"):
        call.results(timeout=1)


def test_what_is_left_in_the_ranks_is_found(ranks: Ranks) -> None:
    def leak() -> None:
        os.dup(0)
        os.open("/etc/hostname", os.O_RDONLY)

    pool = ranks(2)
    with pool.leaves_nothing():
        pool.run(os.getpid)
    with pytest.raises(AssertionError, match="hostname"), pool.leaves_nothing(patience=0.1):
        pool.run(leak, ranks=[1])
    pool.restart()


def test_closing_leaves_nothing() -> None:
    """The rule that this test must leave nothing behind checks it."""
    pool = RankPool(2)
    processes = pool.processes()
    assert len(processes) == 3
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in processes)


def test_ranks_end_with_the_process_that_started_them() -> None:
    script = "import ranks, os; pool = ranks.RankPool(2); print(*pool.processes(), flush=True); os.kill(os.getpid(), 9)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=SOON)
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 3, run.stderr
    deadline = time.monotonic() + SOON
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_pools_unused_for_longest_make_room() -> None:
    from ranks import Pools

    pools = Pools(most_ranks=3)
    first, second = pools.get(1), pools.get(2)
    assert pools.get(1) is first
    pools.get(1, env={"A": "1"})
    assert first.alive(0) and not second.alive(0)
    pools.close()


def test_pools_are_forked_from_one_process_whatever_their_job_and_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from ranks import Pools

    pools = Pools()
    try:
        pool = pools.get(1)
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "another test")
        before = pool.processes()
        pool.restart()
        assert not pool.processes() & before
        pools.get(2, {"HOROVOD_CYCLE_TIME": "3", "TEST_DEVICES": "late"})
        assert len(pools.templates.processes()) == 1
        pools.get(1, {"KERAS_BACKEND": "jax"})
        assert len(pools.templates.processes()) == 2
    finally:
        pools.close()


def test_a_forked_rank_ends_with_what_is_registered_for_its_end(tmp_path: Path) -> None:
    from ranks import Pools

    def register(folder: str) -> None:
        atexit.register(Path(folder, os.environ[config.RANK]).touch)

    pools = Pools()
    pools.get(2).run(register, str(tmp_path))
    pools.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("kind", ["thread", "child", "descriptor"])
def test_what_a_test_leaves_behind_is_found(kind: str) -> None:
    before = Inventory.take()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    child, descriptor = None, None
    if kind == "thread":
        thread.start()
    elif kind == "child":
        child = subprocess.Popen(["sleep", "60"])
    else:
        descriptor = os.open("/etc/hostname", os.O_RDONLY)
    found = left_behind(before, patience=0.1)
    done.set()
    if kind == "thread":
        thread.join()
    if child is not None:
        child.kill()
        child.wait()
    if descriptor is not None:
        os.close(descriptor)
    assert len(found) == 1
    assert {"thread": "'forgotten'", "child": "sleep", "descriptor": "/etc/hostname"}[kind] in found[0]
    assert left_behind(before) == []
