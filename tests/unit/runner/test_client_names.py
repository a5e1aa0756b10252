"""What programs import from the launcher besides ``horovod.run``, used as they use it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import horovod
from horovod.runner import _HorovodArgs
from horovod.runner.common.util import env, secret
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.common.util.timeout import Timeout, TimeoutException
from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.launch import _run
from time_limits import SOON

RANK = """
import os, horovod.common.basics as hvd
for _ in range(2):
    hvd.init()
    print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size())
    hvd.shutdown()
"""


@pytest.mark.parametrize("given", ["", "a secret that the user has set for all"])
def test_a_program_may_start_ranks_by_itself_and_give_them_the_rendezvous_server(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """With a secret from the user, processes that do not inherit the program's environment need no other."""
    monkeypatch.delenv("_HOROVOD_SECRET_KEY", raising=False)
    monkeypatch.setenv("HOROVOD_SECRET_KEY", given or "unset")
    if not given:
        monkeypatch.delenv("HOROVOD_SECRET_KEY")
    plan = get_host_assignments(parse_hosts(hosts_string="localhost:3"), 2, 2)
    server = RendezvousServer(verbose=0)
    port = server.start()
    try:
        if "_HOROVOD_SECRET_KEY" in os.environ:
            monkeypatch.setenv(
                "_HOROVOD_SECRET_KEY", os.environ["_HOROVOD_SECRET_KEY"]
            )  # so that it is removed in the end
        server.init(plan)
        with pytest.raises(ValueError, match="each rank once"):
            server.init(plan[1:])
        ranks = []
        for slot in plan:
            variables = {
                "HOROVOD_HOSTNAME": slot.hostname,
                "HOROVOD_RANK": slot.rank,
                "HOROVOD_SIZE": slot.size,
                "HOROVOD_LOCAL_RANK": slot.local_rank,
                "HOROVOD_LOCAL_SIZE": slot.local_size,
                "HOROVOD_CROSS_RANK": slot.cross_rank,
                "HOROVOD_CROSS_SIZE": slot.cross_size,
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "shm",
            }
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            if given:
                environment.pop("_HOROVOD_SECRET_KEY", None)
            ranks.append(
                subprocess.Popen([sys.executable, "-c", RANK], env=environment, stdout=subprocess.PIPE, text=True)
            )
        assert [rank.communicate(timeout=SOON)[0].split() for rank in ranks] == [
            ["0", "2", "0", "1"] * 2,
            ["1", "2", "1", "1"] * 2,
        ]
    finally:
        server.stop()
        server.stop()


def test_a_secret_that_is_too_short_starts_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_HOROVOD_SECRET_KEY", raising=False)
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "short")
    with pytest.raises(ValueError, match="HOROVOD_SECRET_KEY: expected at least 16 characters"):
        RendezvousServer().start()


def test_import_paths_that_launchers_use() -> None:
    from horovod import data
    from horovod.data import data_loader_base
    from horovod.runner import gloo_run
    from horovod.runner.common.util import hosts

    assert gloo_run.RendezvousServer is RendezvousServer
    assert (gloo_run.parse_hosts, gloo_run.get_host_assignments) == (hosts.parse_hosts, hosts.get_host_assignments)
    assert data.BaseDataLoader is data_loader_base.BaseDataLoader
    assert data.AsyncDataLoaderMixin is data_loader_base.AsyncDataLoaderMixin


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "1"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3)),
        ({"HOROVOD_RANK": "1"}, "HOROVOD_RANK is set, and HOROVOD_SIZE is not"),
        ({"PMI_SIZE": "1"}, "PMI_SIZE is set, and PMI_RANK is not"),
    ],
)
def test_the_rank_before_init(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, int] | str
) -> None:
    for name in [f"{of}_{number}" for of in ("HOROVOD", "OMPI_COMM_WORLD", "PMI") for number in ("RANK", "SIZE")]:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(RuntimeError, match=expected):
            env.get_env_rank_and_size()
    else:
        assert env.get_env_rank_and_size() == expected


def test_variables_that_reach_other_hosts() -> None:
    names = ["PATH", "HOROVOD_RANK", "BASH_FUNC_x", "OLDPWD", "CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"]
    assert list(filter(env.is_exportable, names)) == ["PATH", "HOROVOD_RANK"]


def test_an_object_with_the_command_line_s_attributes_describes_a_job(capfd: pytest.CaptureFixture[str]) -> None:
    args = _HorovodArgs()
    assert args.hosts is None and args.fusion_threshold_mb is None
    args.num_proc = 2
    args.command = ["sh", "-c", "echo $HOROVOD_RANK $HOROVOD_FUSION_THRESHOLD"]
    args.fusion_threshold_mb = 2
    args.nics = {"lo"}
    _run(args)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>:0 2097152", "[1]<stdout>:1 2097152"]
    args.command = ["sh", "-c", "exit 4"]
    with pytest.raises(RuntimeError, match="Exit code: 4"):
        _run(args)
    args.command = None
    with pytest.raises(ValueError, match="command is missing"):
        _run(args)
    args.run_func = lambda: 7
    assert _run(args) == [7, 7]
    with pytest.raises(AttributeError, match="no such setting"):
        _ = args.mistake


def test_keys_and_digests() -> None:
    key = secret.make_secret_key()
    assert len(key) == secret.DIGEST_LENGTH_BYTES == len(secret.compute_digest(key, b"message")) == 32
    assert secret.HOROVOD_SECRET_KEY == "_HOROVOD_SECRET_KEY"
    assert secret.check_digest(key, b"message", secret.compute_digest(key, b"message"))
    assert not secret.check_digest(key, b"message!", secret.compute_digest(key, b"message"))
    assert key != secret.make_secret_key()


def test_time_limits() -> None:
    limit = Timeout(60, "Timed out waiting for {activity}. Check your resources.")
    assert 0 < limit.remaining() <= 60 and not limit.timed_out()
    limit.check_time_out_for("hosts")
    over = Timeout(-1, "Timed out waiting for {activity}. Check your resources.")
    assert over.remaining() == 0 and over.timed_out()
    with pytest.raises(
        TimeoutException, match=r"^Timed out waiting for hosts\. Check your resources\. Timeout after -1 sec"
    ):
        over.check_time_out_for("hosts")


def test_discoveries(tmp_path: Path) -> None:
    class Mine(HostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return {"a": 2}

    assert Mine().find_available_hosts_and_slots() == {"a": 2}
    with pytest.raises(TypeError):
        HostDiscovery()  # type: ignore[abstract]  # which is what is tested
    fixed = FixedHosts({"a": 1})
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}
    assert HostDiscoveryScript("echo a; echo b:3", 2).find_available_hosts_and_slots() == {"a": 2, "b": 3}
    with pytest.raises(ValueError, match="ended with exit status 3"):
        HostDiscoveryScript("exit 3", 2).find_available_hosts_and_slots()

    class FromAFile(HostDiscoveryScript):
        def _execute_discovery_script(self) -> str:
            return "a\nb:1\n"

    assert FromAFile("unused", 2).find_available_hosts_and_slots() == {"a": 2, "b": 1}


def test_missing_packages_raise_with_an_explanation() -> None:
    if importlib.util.find_spec("pyspark") is None:
        with pytest.raises(ImportError, match=r"horovod.spark needs PySpark 3.5 or newer, .*pip install '.\[spark\]'"):
            __import__("horovod.spark")
        assert not hasattr(horovod, "spark")
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ImportError, match=r"horovod.ray needs Ray 2.9 or newer, .*pip install '.\[ray\]'"):
            __import__("horovod.ray")
