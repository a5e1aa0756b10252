"""The file by which a training job finds a compute job, and what is refused before anybody is asked."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

tf = pytest.importorskip("tensorflow")

from horovod.control.secret import make_secret  # noqa: E402  TensorFlow may be missing
from horovod.runner.common.util.timeout import TimeoutException  # noqa: E402
from horovod.tensorflow.data import compute_service, compute_worker  # noqa: E402
from horovod.tensorflow.data.compute_service import (  # noqa: E402
    TfDataServiceConfig,
    send_to_data_service,
    tf_data_service,
)

NOBODY: Any = {"lo": [("127.0.0.1", 9)]}
ADDRESS = "grpc://localhost:1"
SERVERS = ("DispatchServer", "WorkerServer")
CALLS = ("register_dispatcher", "wait_for_dispatcher_registration", "wait_for_shutdown")
CONFIG = TfDataServiceConfig(2, 3, "compute", NOBODY, make_secret(), timeout=7)


def test_the_file_holds_the_whole_configuration_and_only_its_user_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("what an earlier job left")
    CONFIG.write(str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert TfDataServiceConfig.read(str(file)) == CONFIG
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
    assert json.loads(file.read_text())["key"] == CONFIG.key.hex()
    assert TfDataServiceConfig.from_dict(CONFIG.to_dict()) == CONFIG


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        CONFIG.write(str(tmp_path / "folder"))
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_the_key_is_not_printed() -> None:
    assert "key" not in repr(CONFIG) and "dispatchers=2" in repr(CONFIG)


def test_a_file_without_a_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("", "[]", "{}", "null", '{"dispatchers": 1}', json.dumps({**CONFIG.to_dict(), "key": "xyz"})):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: "):
            TfDataServiceConfig.read(str(file))
    with pytest.raises(ValueError, match="dispatcher_side='both': expected one of 'compute', 'training'"):
        replace(CONFIG, dispatcher_side="both")


def test_a_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_service, "_POLL_SECONDS", 0.01)
    file = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(str(file))
    with pytest.raises(TimeoutException, match=r"does not exist after 0\.05 seconds"):
        TfDataServiceConfig.read(str(file), wait_for_file_creation=True, timeout=0.05)
    writer = threading.Timer(0.05, CONFIG.write, [str(file)])
    writer.start()
    assert TfDataServiceConfig.read(str(file), wait_for_file_creation=True, timeout=20) == CONFIG
    writer.join()


def test_send_to_data_service_refuses_dispatchers_of_the_training_side() -> None:
    data = tf.data.Dataset.range(3)
    with pytest.raises(RuntimeError, match="with tf_data_service"):
        data.send_to_data_service(replace(CONFIG, dispatcher_side="training"), 0)
    for wrong in ({"size": 2}, {"reuse_dataset": True}):
        with pytest.raises(ValueError, match="needs reuse_dataset=True and size="):
            send_to_data_service(data, CONFIG, 0, round_robin=True, **wrong)


def test_a_rank_without_a_dispatcher_to_start_says_so() -> None:
    with pytest.raises(ValueError, match="rank 2 has no dispatcher to start: the compute job was started with 2"):
        with tf_data_service(replace(CONFIG, dispatcher_side="training"), 2):
            pass


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], [], ["file", "--dispatchers", "0"], ["file", "--dispatcher-side", "both"]):
        with pytest.raises(SystemExit) as caught:
            compute_worker.main(arguments)
        assert caught.value.code == (0 if arguments == ["--help"] else 2)
        told = "".join(capsys.readouterr())
        assert "usage: python -m horovod.tensorflow.data.compute_worker" in told


@pytest.fixture
def leaving() -> Iterator[None]:
    """SIGTERM as in a compute job."""
    before = signal.signal(signal.SIGTERM, compute_worker._leave)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("moment", [*SERVERS, *CALLS])
def test_the_file_is_gone_before_servers_stop_whenever_the_job_is_ended(
    monkeypatch: pytest.MonkeyPatch, leaving: None, moment: str
) -> None:
    """To stop a server may take longer than a process has that is to end. A server that has not started must not be dropped."""
    happened: list[str] = []

    def called(name: str, *_: object) -> str:
        if name == moment:
            signal.raise_signal(signal.SIGTERM)
        return ADDRESS

    class Server:
        target = ADDRESS

        def __init__(self, name: str, *_: object) -> None:
            called(name)
            happened.append("a server starts")

        def stop(self) -> None:
            happened.append("a server stops")

    client = mock.Mock(**{f"{name}.side_effect": partial(called, name) for name in CALLS})
    monkeypatch.setattr(TfDataServiceConfig, "compute_client", lambda config: client)
    monkeypatch.setattr(compute_service.basics, "rank", lambda: 0)
    monkeypatch.setattr(compute_service.basics, "size", lambda: 1)
    for name in SERVERS:
        monkeypatch.setattr(tf.data.experimental.service, name, partial(Server, name))
    with pytest.raises(SystemExit):
        compute_service.run_worker(
            replace(CONFIG, dispatchers=1, workers_per_dispatcher=1), lambda: happened.append("the file goes")
        )
    started = 1 if moment in ("DispatchServer", "register_dispatcher", "wait_for_dispatcher_registration") else 2
    assert happened[: started + 2] == ["a server starts"] * started + ["the file goes", "a server stops"]
    assert happened.count("a server stops") == started
