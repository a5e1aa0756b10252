"""The identities of GPUs that a process may use."""

from __future__ import annotations

import pytest

import native_devices
from horovod.comm.cuda import nvml

GPUS = ["GPU-aa1", "GPU-aa2", "GPU-b"]


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("0,2", ["GPU-aa1", "GPU-b"]),
        ("2,0", ["GPU-b", "GPU-aa1"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["GPU-aa2"]),
        ("0,7,1", ["GPU-aa1"]),
        ("GPU-b", ["GPU-b"]),
        ("GPU-b,GPU-aa2", ["GPU-b", "GPU-aa2"]),
        ("GPU-aa", []),  # of two
        ("MIG-1,MIG-2", ["GPU-of-MIG-1"]),
        ("GPU-b,MIG-1", ["GPU-b"]),
        (" 1 , 2 ", ["GPU-aa2", "GPU-b"]),
        ("NoDevFiles", []),
    ],
)
def test_a_restriction_shows_some_in_its_order(chosen: str, found: list[str]) -> None:
    assert nvml.selected_gpus(GPUS, chosen, lambda slice: f"GPU-of-{slice}") == found


def test_gpus_that_a_process_may_not_use_are_left_out(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with native_devices.loaded(stand_in, "-GPU-a,GPU-b,GPU-c"):
        assert nvml.visible_gpus() == ["GPU-b", "GPU-c"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert nvml.visible_gpus() == ["GPU-c"]


def test_slices_are_named_by_their_gpu(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with native_devices.loaded(stand_in, "GPU-a,GPU-b"):
        for chosen, found in (
            ("MIG-b-1", "GPU-b"),
            ("MIG-b-2,MIG-b-1", "GPU-b"),
            ("MIG-GPU-a/1/0", "GPU-a"),
            ("MIG-elsewhere", "MIG"),
        ):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
            assert nvml.visible_gpus() == [found]


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_FILE", "libnothing.so.1")
    assert nvml.visible_gpus() is None
