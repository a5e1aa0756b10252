"""When NCCL is chosen, and what is said where it cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from horovod.comm.datatypes import DataType
from horovod.comm.device import GPU, DeviceFacts, shared_by
from horovod.comm.engine import EngineError, EngineGroup
from horovod.comm.nccl import library
from horovod.comm.nccl.engine import NcclEngine
from horovod.comm.reduction import ReduceOp
from horovod.comm.select import Support, device_engine, forced_host_engine, obstacles

V = "HOROVOD_GPU_OPERATIONS"
FREE, BLOCKED = {"nccl": ""}, {"nccl": "no GPU: install one"}


def _support(forced: list[str], found: list[dict[str, str]]) -> dict[int, Support]:
    """What the ranks 2 and 5 say."""
    return {rank: Support(*each) for rank, *each in zip((2, 5), forced, found, strict=True)}


def test_a_rank_without_a_gpu_says_what_to_do() -> None:
    group = EngineGroup(0, 2, ("a", "a"), facts=DeviceFacts((), "PyTorch was built without CUDA"))
    assert obstacles(group, device=GPU) == {"nccl": "PyTorch was built without CUDA"}
    assert "only horovod.torch" in obstacles(EngineGroup(0, 2, ("a", "a")), device=GPU)["nccl"]


def test_a_rank_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", str)
    group = EngineGroup(0, 2, ("a", "a"), facts=DeviceFacts(("one",), ""))
    assert "pip install nvidia-nccl-cu12" in NcclEngine().obstacle(group)


def test_nccl_is_chosen_if_every_rank_can_use_it() -> None:
    assert device_engine(_support(["", ""], [FREE, FREE]), V) == ("nccl", "")
    engine, why = device_engine(_support(["", ""], [FREE, BLOCKED]), V)
    assert engine == "" and "no GPU" in why


def test_forced_and_impossible_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(EngineError, match=rf"{V}=nccl cannot serve this group: rank 5: no GPU: install one.*{V}=HOST"):
        device_engine(_support(["", "nccl"], [FREE, BLOCKED]), V)


@pytest.mark.parametrize("name", ["host", "mpi", "gloo", "tcp", "shm"])
def test_host_memory_can_be_forced(name: str) -> None:
    assert device_engine(_support([name, ""], [{}, FREE]), V)[0] == ""


def test_an_engine_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(
        EngineError, match=rf"{V}=pigeon: there is no such engine .*nccl.*host or one of shm.*gloo, mpi"
    ):
        device_engine(_support(["", "pigeon"], [FREE, {}]), V)


def test_the_name_of_a_host_engine_forces_that_for_the_copies() -> None:
    assert forced_host_engine("mpi", "", V, "C") == forced_host_engine("mpi", "mpi", V, "C") == "mpi"
    assert forced_host_engine("host", "tcp", V, "C") == forced_host_engine("nccl", "tcp", V, "C") == "tcp"
    with pytest.raises(EngineError, match=f"{V}=mpi stages GPU memory .* and C=tcp forces another one"):
        forced_host_engine("mpi", "tcp", V, "C")


@pytest.mark.parametrize(
    ("version", "told"), [(23000, ""), (22907, "needs NCCL 2.30 or newer, and this is NCCL 2.29.7")]
)
def test_several_ranks_on_a_gpu_need_a_version_that_serves_them(
    monkeypatch: pytest.MonkeyPatch, version: int, told: str
) -> None:
    monkeypatch.setattr(library, "loaded", lambda: SimpleNamespace(version=lambda: version))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    found = NcclEngine().not_alone()
    assert told in found and bool(told) == bool(found)


def test_ranks_of_a_host_that_share_a_gpu_are_told() -> None:
    assert shared_by(["a", "a"], [["0", "1"], ["0", "1"]]) == ["", ""]
    assert shared_by(["a", "a"], [["one"], ["other"]]) == ["", ""]
    assert shared_by(["a", "a", "b"], [["0"], ["0"], ["0"]]) == ["2 ranks of host a share 1 GPU"] * 2 + [""]
    assert shared_by(["a", "a"], [[], ["0"]]) == ["", ""]  # it does not matter there


@pytest.mark.parametrize(
    ("data_type", "op", "scaled", "lack"),
    [
        (DataType.FLOAT16, ReduceOp.AVERAGE, True, ""),
        (DataType.BFLOAT16, ReduceOp.SUM, True, ""),
        (DataType.INT64, ReduceOp.PRODUCT, False, ""),
        (DataType.UINT32, ReduceOp.MIN, False, ""),
        (DataType.FLOAT32, ReduceOp.ADASUM, False, "no Adasum"),
        (DataType.INT16, ReduceOp.SUM, False, "does not reduce int16"),
        (DataType.BOOL, ReduceOp.SUM, False, "does not reduce bool"),
        (DataType.COMPLEX64, ReduceOp.SUM, False, "does not reduce complex64"),
        (DataType.INT32, ReduceOp.AVERAGE, True, "does not scale int32"),
        (DataType.FLOAT32, ReduceOp.MAX, True, "no Max with factors"),
    ],
)
def test_reductions_that_nccl_lacks(data_type: DataType, op: ReduceOp, scaled: bool, lack: str) -> None:
    found = NcclEngine().lacks([DataType.FLOAT32, data_type], op, scaled)
    assert lack in found and bool(lack) == bool(found)
    assert NcclEngine().lacks([data_type], None, False) == ""
