"""``horovod.run``: a function on every rank, from scripts, threads and wherever else Python runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import horovod
from launcher.harness import Launcher, finish
from time_limits import SOON


@pytest.fixture(autouse=True)
def importable(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launcher.environment().items():
        monkeypatch.setenv(name, value)


def test_results_come_back_by_rank() -> None:
    factor = 10  # a closure

    def work(offset: int, *, scale: int = 1) -> tuple[int, int]:
        here = int(os.environ["HOROVOD_RANK"])
        return here, scale * (here * factor + offset)

    assert horovod.run(work, (1,), {"scale": 2}, num_proc=3) == [(0, 2), (1, 22), (2, 42)]


def test_results_may_be_of_a_class_of_the_script() -> None:
    class RankOnHost(NamedTuple):
        rank: int
        host: str

    def work() -> RankOnHost:
        return RankOnHost(int(os.environ["HOROVOD_RANK"]), "here")

    assert [tuple(each) for each in horovod.run(work, num_proc=2)] == [(0, "here"), (1, "here")]


def test_one_rank_is_the_default() -> None:
    assert horovod.run(lambda: os.environ["HOROVOD_SIZE"]) == ["1"]


def test_output_goes_to_the_callers_streams(capsys: pytest.CaptureFixture[str]) -> None:
    horovod.run(lambda: print("hello"), num_proc=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]


def test_an_exception_is_raised_with_its_ranks_traceback() -> None:
    def work() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            raise LookupError("nothing to be found")
        time.sleep(1000)

    with pytest.raises(RuntimeError, match="nothing to be found") as caught:
        horovod.run(work, num_proc=2)
    assert "Horovod detected that one or more processes exited with non-zero status" in str(caught.value)
    assert "rank 1 failed" in str(caught.value)
    assert "test_function.py" in str(caught.value)
    assert "run_task.py" not in str(caught.value)
    assert isinstance(caught.value.__cause__, LookupError)


def test_an_exception_that_cannot_travel_still_tells_its_story() -> None:
    class Odd(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__("odd one")

    def work() -> None:
        raise Odd(1, 2)

    with pytest.raises(RuntimeError, match="odd one") as caught:
        horovod.run(work)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: os._exit(0), "rank 0 ended, with exit code 0, before"),
        (lambda: os._exit(8), "Exit code: 8"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: (number for number in range(3)), "cannot be sent back"),
        (lambda: exit(3), "SystemExit: 3"),
    ],
)
def test_a_rank_without_a_result_is_an_error(work: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        horovod.run(work)


def test_large_results_arrive_whole() -> None:
    size = 70 << 20  # more than one message holds
    (result,) = horovod.run(lambda: bytes(size - 1) + b"!")
    assert len(result) == size and result.endswith(b"!")


def test_it_works_from_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(horovod.run(lambda: 5)))
    thread.start()
    thread.join(SOON)
    assert results == [[5]]


def test_a_script_sends_functions_of_its_own_and_of_its_neighbours(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    (folder / "script.py").write_text(
        "import horovod, neighbour\n"
        "def work(x):\n    return neighbour.double(x) + offset\n"
        "offset = 1\n"
        "if __name__ == '__main__':\n"
        "    print(horovod.run(work, (4,), num_proc=2), horovod.run(neighbour.double, (4,)))\n"
    )
    assert finish(launcher.python(str(folder / "script.py"))).stdout == "[9, 9] [8]\n"


def test_ctrl_c_ends_the_ranks_and_is_raised(launcher: Launcher) -> None:
    script = "import horovod, time; horovod.run(lambda: (print('ready'), time.sleep(1000)), num_proc=2)"
    process = launcher.python("-c", script)
    launcher.await_line(process, "ready")
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in finish(process).stderr
    launcher.await_nothing()


def test_a_killed_caller_leaves_nothing(launcher: Launcher) -> None:
    script = "import horovod, time; horovod.run(lambda: (print('ready'), time.sleep(1000)), num_proc=2)"
    process = launcher.python("-c", script)
    launcher.await_line(process, "ready")
    process.kill()
    launcher.await_nothing()


def what_is_open() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def test_a_call_leaves_no_descriptor_and_no_thread_behind() -> None:
    horovod.run(lambda: None)
    before = what_is_open()
    horovod.run(lambda: None, num_proc=2)
    assert what_is_open() == before


def test_old_names_still_work_and_say_so() -> None:
    with pytest.warns(DeprecationWarning, match="num_proc"):
        assert horovod.run(lambda: 1, np=2) == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": "localhost:1", "hostfile": "x"}, "hosts or hostfile"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo or use_mpi"),
        ({"min_num_proc": 3, "max_num_proc": 2}, "not more than --max-np"),
        ({"num_proc": 0}, "at least 1"),
        ({"num_proc": "2"}, "whole number, not '2'"),
        ({"num_proc": 2.5}, "whole number"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "available slots"),
        ({"hosts": "localhost"}, "localhost"),
        ({"executable": "/no/such/python"}, "command not found"),
    ],
)
def test_wrong_arguments_are_value_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        horovod.run(lambda: None, **arguments)


def test_an_elastic_function_goes_on_without_a_rank_that_is_lost() -> None:
    def work() -> tuple[int, int, int]:
        from horovod._bindings.objects import allgather_object, broadcast_object
        from horovod.common import basics
        from horovod.common.elastic import ObjectState, Reset, run_fn

        process, known = os.environ["HOROVOD_ELASTIC_PROCESS"], basics.rank
        basics.init()
        state = ObjectState(broadcast_object, known, step=0)

        def train(state: Any) -> int:
            while state.step < 5:
                if (process, state.step) == ("0", 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                allgather_object(state.step)
                state.step += 1
                state.commit()
            return int(state.step)

        steps = run_fn(train, Reset(basics.shutdown, basics.init))(state)
        return steps, basics.rank(), basics.size()

    found = horovod.run(work, hosts="localhost:3", min_num_proc=2, max_num_proc=3)
    assert found == [(5, 0, 2), (5, 1, 2)]
