"""What is known of a host's GPUs without CUDA, and how CUDA's errors are told."""

from __future__ import annotations

import ctypes.util
from pathlib import Path
from typing import Any

import pytest

from horovod.comm.cuda import library
from horovod.comm.cuda.library import Cuda, CudaError


class Failing:
    """A library whose calls return ``code``."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cuEventQuery(self, event: int) -> int:
        return self.code

    def cuPointerGetAttribute(self, found: Any, attribute: int, address: int) -> int:
        found._obj.value = 3
        return self.code

    def cuGetErrorString(self, code: int, words: Any) -> int:
        words._obj.value = b"an illegal memory access was encountered"
        return 0


def test_an_error_is_in_cudas_words() -> None:
    with pytest.raises(CudaError, match=r"cuEventQuery: CUDA says 'an illegal memory access.*' \(code 700\)"):
        Cuda(Failing(700)).reached(1)


def test_an_event_that_is_to_come_is_no_error() -> None:
    assert not Cuda(Failing(library.NOT_READY)).reached(1)
    assert Cuda(Failing(0)).reached(1)


def test_the_device_of_an_address_is_what_cuda_says() -> None:
    assert Cuda(Failing(0)).ordinal(1 << 40) == 3
    with pytest.raises(CudaError, match="cuPointerGetAttribute"):
        Cuda(Failing(1)).ordinal(1 << 40)


@pytest.mark.parametrize(
    ("value", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("1,-1,2", 1), ("GPU-8932f937", 1), ("0,1,2,3,4,5", 4)],
)
def test_visible_devices_are_counted_without_asking_cuda(
    monkeypatch: pytest.MonkeyPatch, value: str | None, count: int
) -> None:
    names = ["nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev", name) for name in names]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert library.visible() == count


def test_a_library_that_lacks_something_is_refused_with_what_is_needed() -> None:
    path = ctypes.util.find_library("c")
    assert path is not None
    with pytest.raises(OSError, match=r"has no cuInit: a driver for CUDA 11\.2"):
        Cuda.load(path)
