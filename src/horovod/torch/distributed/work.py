"""The work that an operation returns to PyTorch: an object to wait for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist

from horovod.core.errors import CollectiveTimeoutError, HorovodInternalError
from horovod.core.requests.handle import Handle
from horovod.torch.device.base import TorchMemory
from horovod.torch.distributed import failures
from horovod.torch.distributed.futures import Origin, future_of
from horovod.torch.uncompiled import uncompiled

Finish = Callable[[Handle], None]
"""Called once when the collective is done, to copy its results to the caller's tensors."""

_NO_LIMIT = timedelta(0)
"""PyTorch's value for a wait that has no limit of its own."""
_KEPT_BY_CPP = torch.__version__ >= "2.7"
"""Whether C++ code that gets a work keeps its Python object, too. Before PyTorch 2.7 it keeps only its own part, whose ``wait``
blocks forever once the Python object is gone (https://github.com/pytorch/pytorch/pull/146376)."""
unawaited: deque[HorovodWork] = deque(maxlen=256)
"""The latest works that nobody has waited for yet, if C++ code does not keep them: it holds few at a time."""


@uncompiled
class HorovodWork(dist.Work):
    """One call of an operation. PyTorch's C++ code calls only ``wait`` and ``get_future``; Python code may call all methods.

    Args:
        handle: the handle of the collective.
        memory: the memory of its tensors; None for host memory.
        outputs: the tensors with the results for the caller.
        what: the operation, for error messages.
        finish: copies the results to ``outputs``; None if the collective has written them there.
        seconds: the default time limit of :meth:`wait`; -1: none but the runtime's.
        origin: makes the origin for collectives that callbacks of the future call; None: such collectives raise
            NotImplementedError.
    """

    def __init__(
        self,
        handle: Handle,
        memory: TorchMemory | None,
        outputs: Sequence[torch.Tensor],
        what: str,
        finish: Finish | None = None,
        seconds: float = -1,
        origin: Callable[[], Origin] | None = None,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._memory = memory
        self._outputs = list(outputs)
        self._lists: Sequence[Sequence[torch.Tensor]] = ()
        self._what = what
        self._finish = finish
        self._seconds = seconds
        self._origin = origin
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._future: Any = None
        if not _KEPT_BY_CPP:
            unawaited.append(self)
        if profiler._is_profiler_enabled:
            _record(what, handle, self._outputs)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until the results are in the outputs, and return True. For tensors on a device it makes the current stream wait
        for the results instead.

        Args:
            timeout: the time limit; zero: that of the call.

        Raises:
            HorovodInternalError: the collective failed. The text names the ranks, the group's call and the lines.
            CollectiveTimeoutError: the collective was not done within ``timeout``. It continues, and the caller may wait again.
        """
        if not _KEPT_BY_CPP:
            _keep_no_longer(self)
        own = timeout.total_seconds()
        seconds = own or self._seconds
        try:
            self._handle.wait(seconds, final=not own)
        except TimeoutError:
            raise CollectiveTimeoutError(
                f"{self._what} was not done within {seconds:g} seconds: another rank has not called it yet, or is slow. The "
                "tensors are still in use."
            ) from None
        except HorovodInternalError as error:
            failures.note(error)
            raise
        if self._memory is not None or self._finish is not None or self._failure is not None:
            self._settle()
        return True

    def _settle(self) -> None:
        """Copy the results of a completed collective to the outputs, once. Raises the same error each time if that fails."""
        if self._memory is not None:
            self._memory.arrive(self._handle)
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    # A thread of ours may do it, which is in none of the modes of the script's.
                    inference = any(tensor.is_inference() for tensor in self._outputs)
                    with torch.inference_mode() if inference else torch.no_grad():
                        finish(self._handle)
                except Exception as error:
                    self._failure = error
        if self._failure is not None:
            raise self._failure

    def of_lists(self, lists: Sequence[Sequence[torch.Tensor]]) -> HorovodWork:
        """Have the value of the future be ``lists``, if there are several: the outputs as the caller has passed them."""
        if len(lists) > 1:
            self._lists = lists
        return self

    def _results(self) -> Any:
        self.wait()
        return self._lists or self._outputs

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the list of outputs, or of the lists that were passed; the same one each time."""
        if not _KEPT_BY_CPP:
            _keep_no_longer(self)
        if self._future is None:
            devices = list({tensor.device for tensor in self._outputs if not tensor.is_cpu})
            origin = None if self._origin is None else self._origin()
            self._future = future_of(self._handle.then, self._results, origin, devices)
        return self._future

    def future_of_one(self) -> Any:
        """A ``torch.futures.Future`` of the only output."""
        return future_of(self._handle.then, lambda: self._results()[0], None, ())

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        if not self._handle.done():
            self._handle.leave_to_worker()
            return False
        if self._handle.error is None:
            try:
                self._settle()
            except Exception:
                return True  # wait() raises it
            return self._memory is None or self._memory.arrived(self._handle)
        return True

    def is_success(self) -> bool:
        """Whether the collective is done and has not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the collective; None if it has not failed."""
        return self._handle.error or self._failure

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the outputs. Raises as :meth:`wait`."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def source_rank(self) -> int:
        """The rank in the group that a received tensor came from; -1 for other operations."""
        return int(self._handle.result) if self._what == "recv" else -1

    _source_rank = source_rank


def _keep_no_longer(work: HorovodWork) -> None:
    with suppress(ValueError):  # it is not among the latest any more, or has been waited for
        unawaited.remove(work)


def _record(what: str, handle: Handle, tensors: Sequence[torch.Tensor]) -> None:
    """Show the call in PyTorch's profiler, until the collective is done, as it shows calls of other back ends."""
    autograd: Any = torch.autograd
    event = autograd._record_function_with_args_enter(f"horovod:{what}", *tensors)
    handle.then(partial(autograd._record_function_with_args_exit, event), hurried=False)
