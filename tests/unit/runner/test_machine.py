"""Which names mean this machine, and how much of it a job may use."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from horovod.runner import machine, worker_environment


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.1.2.3", socket.gethostname()])
def test_names_of_this_machine(name: str) -> None:
    assert machine.is_local(name)


def test_addresses_of_other_machines() -> None:
    assert not machine.is_local("192.0.2.1")


def test_a_name_without_address() -> None:
    with pytest.raises(OSError):
        machine.is_local("no-such-host.invalid")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_a_containers_quota_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.usable_cores(tmp_path) == (cores or 64)


def test_usable_cores_respect_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("cores", "ranks", "share"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_a_fair_share(cores: int, ranks: int, share: str) -> None:
    assert set(worker_environment.threads({}, cores, ranks).values()) == {share}


def test_the_users_own_number_of_threads_stays() -> None:
    assert worker_environment.threads({"OMP_NUM_THREADS": "3"}, 8, 2) == {}


def test_tensorflow_gets_the_same_share_unless_the_user_said_otherwise() -> None:
    share = worker_environment.threads({"TF_NUM_INTEROP_THREADS": "5"}, 8, 2)
    assert share == {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4", "TF_NUM_INTRAOP_THREADS": "4"}
    assert worker_environment.threads({}, 8, 2)["TF_NUM_INTEROP_THREADS"] == "4"


def test_ranks_keep_memory_for_the_next_step() -> None:
    limits = worker_environment.memory({"PATH": "/bin", "GLIBC_TUNABLES": "glibc.rtld.nns=2"})
    assert set(limits) == {
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_TOP_PAD_",
        "THP_MEM_ALLOC_ENABLE",
    }


@pytest.mark.parametrize(
    "tuned",
    [
        {"MALLOC_ARENA_MAX": "2"},
        {"MALLOC_TRIM_THRESHOLD_": "1000"},
        {"GLIBC_TUNABLES": "glibc.malloc.check=3"},
        {"LD_PRELOAD": "/usr/lib/libtcmalloc.so"},
    ],
)
def test_a_tuned_allocator_keeps_its_settings(tuned: dict[str, str]) -> None:
    assert worker_environment.memory(tuned) == {"THP_MEM_ALLOC_ENABLE": "1"}
    assert worker_environment.memory({**tuned, "THP_MEM_ALLOC_ENABLE": "0"}) == {}
