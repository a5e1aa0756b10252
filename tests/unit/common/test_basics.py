"""What every binding exports about the life and the abilities of the runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from horovod._base.config import DYNAMIC_PROCESS_SETS
from horovod.comm.nccl import library
from horovod.common import basics

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("HOROVOD_"):
            monkeypatch.delenv(name)
    yield
    basics.shutdown()


@pytest.mark.parametrize("comm", [None, [], (), [0], range(1)])
def test_all_processes(comm: object) -> None:
    assert not basics.is_initialized()
    basics.init(comm)
    assert basics.is_initialized()
    assert (basics.size(), basics.rank()) == (1, 0)


@pytest.mark.parametrize("comm", [5, 1.5, object()])
def test_what_is_no_communicator(comm: object) -> None:
    with pytest.raises(ValueError, match="Invalid type of argument comm"):
        basics.init(comm)
    assert not basics.is_initialized()


@pytest.mark.parametrize("text", ["dynamic", "Dynamic", "DYNAMIC"])
def test_sets_that_are_added_later(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(DYNAMIC_PROCESS_SETS, "0")
    basics.init(process_sets=text)
    assert os.environ[DYNAMIC_PROCESS_SETS] == "1"
    assert basics.is_initialized()


def test_a_text_that_means_nothing() -> None:
    with pytest.raises(ValueError, match="static"):
        basics.init(process_sets="static")
    assert not basics.is_initialized()


@pytest.mark.parametrize(
    "question",
    [
        basics.size,
        basics.rank,
        basics.local_size,
        basics.local_rank,
        basics.cross_size,
        basics.cross_rank,
        basics.mpi_threads_supported,
        basics.stop_timeline,
    ],
)
def test_before_init(question: Callable[[], object]) -> None:
    with pytest.raises(ValueError) as caught:
        question()
    assert str(caught.value) == NOT_INITIALIZED


def test_abilities_can_be_asked_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", str)  # no NCCL, which PyTorch may bring
    assert basics.gloo_built()
    assert not basics.gloo_enabled()
    basics.init()
    assert basics.gloo_enabled()
    for no in (basics.mpi_enabled, basics.ddl_built, basics.ccl_built, basics.cuda_built):
        assert no() is False
    assert basics.rocm_built() is False
    assert basics.nccl_built() == 0
    assert basics.mpi_built() is basics.module_available("mpi4py")
    with pytest.raises(ValueError, match="MPI is not enabled"):
        basics.mpi_threads_supported()


def test_a_timeline_needs_its_variable() -> None:
    with pytest.raises(ValueError) as caught:
        basics.start_timeline("/tmp/never.json")
    assert str(caught.value) == NOT_INITIALIZED
    basics.init()
    with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage"):
        basics.start_timeline("/tmp/never.json")
    basics.stop_timeline()


@pytest.mark.parametrize(
    ("name", "answer"), [("json", True), ("os.path", True), ("no_such_module", False), ("no.such.module", False)]
)
def test_modules_that_could_be_imported(name: str, answer: bool) -> None:
    assert basics.module_available(name) is answer
