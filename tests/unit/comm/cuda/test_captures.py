"""Captures of CUDA graphs, while another thread asks for events: with CUDA's rules as the C library plays them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import native_devices
from horovod.comm.cuda.library import Cuda, CudaError
from horovod.comm.cuda.runtime import CudaRuntime
from native_devices import GLOBAL, RELAXED, THREAD_LOCAL


def elsewhere(run: Callable[[], Any]) -> list[Any]:
    """What a call on another thread returns or raises."""
    found: list[Any] = []

    def target() -> None:
        try:
            found.append(run())
        except CudaError as error:
            found.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_events_are_asked_for_beside_every_capture(stand_in: str, mode: int) -> None:
    with native_devices.loaded(stand_in) as library:
        runtime = CudaRuntime(Cuda.load(stand_in), 0)
        marker = runtime.record(runtime.new_stream())
        runtime.wait(None, marker)
        for asks in (lambda run: [run()], elsewhere):  # on the thread that captures, and on another
            library.capture(True, mode)
            found = asks(lambda: runtime.query(marker))
            assert library.capture(False) and found == [True]


def test_the_stand_in_knows_what_breaks_a_capture(stand_in: str) -> None:
    """Else the test above could not fail."""
    with native_devices.loaded(stand_in) as library:
        cuda = Cuda.load(stand_in)
        runtime = CudaRuntime(cuda, 0)
        marker = runtime.record(runtime.new_stream())
        runtime.wait(None, marker)

        def query() -> bool:
            cuda.call("cuCtxPushCurrent_v2", runtime._context)
            return cuda.reached(marker.address)

        library.capture(True, GLOBAL)
        (error,) = elsewhere(query)
        assert not library.capture(False)
        assert isinstance(error, CudaError) and "stream is capturing" in str(error)


def test_the_mode_of_the_thread_is_as_it_was_after_a_block(stand_in: str) -> None:
    def exchanged(cuda: Cuda, mode: int) -> int:
        given = ctypes.c_int(mode)
        cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(given))
        return given.value

    with native_devices.loaded(stand_in):
        cuda = Cuda.load(stand_in)
        assert exchanged(cuda, THREAD_LOCAL) == GLOBAL
        with cuda.beside_captures():
            with cuda.beside_captures():
                pass
            assert exchanged(cuda, RELAXED) == RELAXED
        assert exchanged(cuda, GLOBAL) == THREAD_LOCAL


def test_pytorchs_runtime_asks_beside_captures_on_cuda(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from horovod.torch.device import runtime

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with native_devices.loaded(stand_in) as library:
        cuda = Cuda.load(stand_in)
        beneath = CudaRuntime(cuda, 0)
        marker = beneath.record(beneath.new_stream())
        beneath.wait(None, marker)

        def query() -> bool:
            cuda.call("cuCtxPushCurrent_v2", beneath._context)
            return cuda.reached(marker.address)

        block = runtime.beside_captures_on("cuda")

        def guarded() -> bool:
            with block():
                return query()

        library.capture(True, GLOBAL)
        found = elsewhere(guarded)
        assert library.capture(False) and found == [True]
        monkeypatch.setattr(torch.version, "cuda", None)
        assert runtime.beside_captures_on("cuda") is nullcontext  # HIP has none here
