"""A device of which everything is late: a PyTorch backend in Python, for tests of what is done with real ones.

``import late_device`` in a process gives it the devices ``late:0`` and ``late:1``. Their tensors are computed by one thread
that plays all streams: it takes the work of each stream in order, but goes from stream to stream at random and dawdles, so
that only events (or waiting on the host) make one stream's work come before another's. New memory holds nonsense until the
work that fills it has been done; an error shows when somebody waits for an event, whoever that is, as on real devices.
Whoever forgets to wait gets wrong numbers, sooner or later; whoever lets go of memory that another stream still works on is
told by :func:`violations`.

``torch.late`` has the functions of ``torch.cuda`` that are used here, with the same meaning.
"""

from __future__ import annotations

import atexit
import contextlib
import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.backend_registration as registration
from torch.utils._pytree import tree_flatten, tree_map

from late_kernels import KERNELS
from time_limits import SOON

DEVICES = 2
_aten = torch.ops.aten
_violations: list[str] = []


def violations() -> list[str]:
    """What was done with memory that must not be done; the list begins anew."""
    found = list(_violations)
    _violations.clear()
    return found


@contextlib.contextmanager
def with_nccl(native: str = "") -> Iterator[Any]:
    """A block in which late devices have an engine that moves their memory: NCCL, as :mod:`recorded_nccl` plays it, or with its
    path the C library of :mod:`native_devices`. The block's value is what plays it. Begins before ``init()``."""
    import native_devices
    from horovod.torch.device import runtime
    from recorded_nccl import RecordedNccl, loaded

    with contextlib.ExitStack() as stack:
        runtime.IN_MEMORY["late"] = in_memory
        stack.callback(runtime.IN_MEMORY.pop, "late")
        # What keeps a late tensor's memory is its block; PyTorch knows no storage of it.
        stack.enter_context(mock.patch.object(runtime.TorchRuntime, "memory_of", lambda _, tensor: tensor.block))
        stack.enter_context(
            mock.patch.object(
                runtime.TorchRuntime, "record_stream", lambda _, block, stream: block.uses.recorded.add(stream)
            )
        )
        plays: Any
        if native:
            plays = stack.enter_context(native_devices.loaded(native))
            stack.enter_context(
                plays.on_streams_of(
                    lambda stream, work: stream_at(stream).push(work),
                    lambda stream, address: touched(stream_at(stream), address),
                )
            )
        else:
            plays = RecordedNccl(stream_at, touched)
            stack.enter_context(loaded(plays))
        stack.enter_context(reachable())
        yield plays


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """A block in which Horovod stages late tensors as it does those of CUDA devices, in memory that is not pinned."""
    from horovod.torch import fused_batch_norm
    from horovod.torch.device import runtime, staging
    from horovod.torch.device.pinned import PinnedPool
    from horovod.torch.tensors import REACHABLE

    def allocate(size: int) -> torch.Tensor:
        return torch.full((size,), 205, dtype=torch.uint8)

    _violations.clear()
    _engine.failure = None

    def guard(kind: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return _beside_captures if kind == "late" else guard_of_others(kind)

    guard_of_others, runtime.beside_captures_on = runtime.beside_captures_on, guard
    before, staging.pool = staging.pool, PinnedPool(allocate)
    REACHABLE.add("late")
    fused_batch_norm.DEVICES.add("late")
    try:
        yield
    finally:
        staging.close()
        REACHABLE.discard("late")
        fused_batch_norm.DEVICES.discard("late")
        staging.pool = before
        runtime.beside_captures_on = guard_of_others


# Streams and events


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._reached = threading.Event()
        self._reached.set()
        self._after: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        reached = self._reached = threading.Event()
        chosen = stream or current_stream()
        with _engine.changed:
            chosen.push(reached.set)
            self._after = {**chosen.after, chosen: chosen.pushed}

    def wait(self, stream: Stream | None = None) -> None:
        reached = self._reached
        chosen = stream or current_stream()
        with _engine.changed:
            chosen.push(after=reached)
            for other, position in self._after.items():
                chosen.after[other] = max(position, chosen.after.get(other, 0))

    def query(self) -> bool:
        _ask_beside_captures("queried")
        return self._reached.is_set()

    def synchronize(self) -> None:
        _ask_beside_captures("waited for")
        assert self._reached.wait(SOON), "the device is stuck"
        failure, _engine.failure = _engine.failure, None
        if failure is not None:
            raise RuntimeError(f"the device failed: {failure}") from failure


class Stream:
    """As ``torch.cuda.Stream``: ``push`` queues work behind all that was queued before.

    Attributes:
        pushed: how many pieces of work it was given.
        after: by stream, how much of that one's work comes before whatever this one is given next.
    """

    def __init__(self, device: Any = None, name: str = "side", priority: int = 0) -> None:
        self.device = _as_device(device)
        self.cuda_stream = id(self)
        self.name = f"{name} stream of {self.device}"
        self.work: deque[tuple[Callable[[], Any], threading.Event | None]] = deque()
        self.pushed = 0
        self.after: weakref.WeakKeyDictionary[Stream, int] = weakref.WeakKeyDictionary()
        with _engine.changed:
            _engine.streams.add(self)

    def push(self, work: Callable[[], Any] = lambda: None, after: threading.Event | None = None) -> None:
        """Queue work, which waits until ``after`` is set."""
        with _engine.changed:
            self.work.append((work, after))
            self.pushed += 1
            _engine.changed.notify()
            _engine.wake()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Engine:
    """The thread that does all streams' work; it ends when there is none."""

    def __init__(self) -> None:
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.changed = threading.Condition(threading.RLock())
        self.random = random.Random(7)
        self.dawdle = 300e-6
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """See that there is a thread; the lock is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="late-device", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self.changed:
                busy = [stream for stream in self.streams if stream.work]
                ready = [each for each in busy if each.work[0][1] is None or each.work[0][1].is_set()]
                if not busy:
                    self._thread = None
                    return
                if not ready:
                    self.changed.wait(0.01)
                    continue
                stream = self.random.choice(ready)
                work, _ = stream.work[0]
            if self.dawdle:
                time.sleep(self.random.random() * self.dawdle)
            try:
                with torch.no_grad():
                    work()
            except Exception as failure:
                self.failure = failure
            with self.changed:
                stream.work.popleft()


_engine = _Engine()


@atexit.register
def drain() -> None:
    """Wait until all work is done and the thread has ended."""
    thread = _engine._thread
    if thread is not None:
        thread.join(SOON)


def dawdle(seconds: float) -> None:
    """How long, at most, the device lets each piece of work wait."""
    _engine.dawdle = seconds


_captured: set[Any] = set()
_asking = threading.local()


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """As :meth:`horovod.comm.cuda.library.Cuda.beside_captures`."""
    before = getattr(_asking, "beside", False)
    _asking.beside = True
    try:
        yield
    finally:
        _asking.beside = before


def _ask_beside_captures(how: str) -> None:
    """CUDA's rule for captures in its default mode."""
    if _captured and not getattr(_asking, "beside", False):
        _violations.append(f"{threading.current_thread().name} {how} an event and made a capture invalid")


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """A block in which the calling thread's stream is said to be captured into a graph. What it is given is done as always."""
    stream = current_stream()
    _captured.add(stream)
    try:
        yield
    finally:
        _captured.discard(stream)


class _Local(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


_local = _Local()
_default: dict[int, Stream] = {}


def _as_device(device: Any) -> torch.device:
    if device is None:
        return torch.device("late", _local.device)
    made = torch.device(device) if not isinstance(device, int) else torch.device("late", device)
    return made if made.index is not None else torch.device("late", _local.device)


def current_stream(device: Any = None) -> Stream:
    index = _as_device(device).index
    if index not in _local.streams:
        with _engine.changed:
            if index not in _default:
                _default[index] = Stream(torch.device("late", index), "default")
        return _default[index]
    return _local.streams[index]


@contextlib.contextmanager
def _with_device(device: Any) -> Iterator[None]:
    before, _local.device = _local.device, _as_device(device).index
    try:
        yield
    finally:
        _local.device = before


@contextlib.contextmanager
def _with_stream(stream: Stream) -> Iterator[None]:
    index = stream.device.index
    before = _local.streams.get(index)
    _local.streams[index] = stream
    try:
        with _with_device(stream.device):
            yield
    finally:
        if before is None:
            del _local.streams[index]
        else:
            _local.streams[index] = before


def _set_device(device: Any) -> None:
    _local.device = _as_device(device).index


def synchronize(device: Any = None) -> None:
    for stream in list(_engine.streams):
        if stream.device == _as_device(device):
            stream.synchronize()


# Memory and tensors


class _Uses:
    """What streams still have to do with a piece of memory, which is there until they have done it."""

    def __init__(self, owner: Stream, storage: torch.UntypedStorage) -> None:
        self.owner = owner
        self.storage = storage
        self.last: dict[Stream, int] = {}
        self.recorded: set[Stream] = set()
        self.pending: Counter[Stream] = Counter()
        self.lock = threading.Lock()

    def freed(self) -> None:
        """PyTorch may give the memory to work of its owner that is queued from now on, and comes after what the recorded
        streams were given until now."""
        with _engine.changed, self.lock:
            for stream, count in self.pending.items():
                waits = any(each.after.get(stream, 0) >= self.last[stream] for each in (self.owner, *self.recorded))
                if count > 0 and stream is not self.owner and stream not in self.recorded and not waits:
                    _violations.append(f"memory of the {self.owner.name} was freed while the {stream.name} works on it")

    def add(self, stream: Stream, count: int) -> None:
        with _engine.changed, self.lock:
            self.pending[stream] += count
            if count > 0:
                self.last[stream] = stream.pushed + 1


class _Block:
    """Held by all tensors that share a piece of memory, which is that of the storage of ``inner``."""

    def __init__(self, stream: Stream, inner: torch.Tensor) -> None:
        self.storage = inner.untyped_storage()
        self.uses = _Uses(stream, self.storage)
        self.start = self.storage.data_ptr()
        self.stop = self.start + self.storage.nbytes()
        _blocks.add(self)
        weakref.finalize(self, self.uses.freed).atexit = False


_blocks: weakref.WeakSet[_Block] = weakref.WeakSet()


def block_at(address: int) -> _Block:
    """The piece of memory that an address lies in."""
    return next(block for block in list(_blocks) if block.start <= address < block.stop)


def stream_at(address: int) -> Stream:
    """The stream that C functions know by an address."""
    with _engine.changed:
        return next(stream for stream in _engine.streams if stream.cuda_stream == address)


def touched(stream: Stream, address: int) -> Callable[[], None]:
    """Work on a stream uses memory, until what this returns is called."""
    try:
        uses = block_at(address).uses
    except StopIteration:
        _violations.append(f"work was put on the {stream.name} with memory that was freed already")
        return lambda: None
    uses.add(stream, 1)
    return lambda: uses.add(stream, -1)


def in_memory(device: torch.device, address: int, length: int, itemsize: int) -> LateTensor:
    """A tensor of ``length`` integers of ``itemsize`` bytes at an address, which does not hold the memory."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    block = block_at(address)
    view = torch.empty(0, dtype=torch.uint8).set_(block.storage)
    first = address - block.start
    return LateTensor(view[first : first + length * itemsize].view(dtype), device, block)


class LateTensor(torch.Tensor):
    """A tensor on a late device. ``inner`` is where its elements will be."""

    inner: torch.Tensor
    block: _Block

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device, block: _Block) -> LateTensor:
        made: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner, made.block = inner, block
        return made

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.uses.recorded.add(stream)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} tensor to numpy")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LateTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


_NONSENSE = {torch.bool: True, torch.uint8: 201}


def _new(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> LateTensor:
    with torch.inference_mode(False):
        inner = torch.empty_strided(shape, strides, dtype=dtype)
    inner.fill_(float("nan") if dtype.is_floating_point or dtype.is_complex else _NONSENSE.get(dtype, -99))
    return LateTensor(inner, device, _Block(current_stream(device), inner))


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, LateTensor) else value


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        k: torch.device("cpu") if isinstance(v, torch.device) and v.type == "late" else v for k, v in kwargs.items()
    }


def _push(stream: Stream, work: Callable[[], Any], tensors: Sequence[LateTensor]) -> None:
    """Queue work on some tensors."""
    uses = {id(tensor.block): tensor.block.uses for tensor in tensors}.values()
    for each in uses:
        each.add(stream, 1)

    def done() -> None:
        work()
        for each in uses:
            each.add(stream, -1)

    stream.push(done)


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled():  # where what is made of other operations comes here whole
        made_of_others = func.decompose(*args, **kwargs)
        if made_of_others is not NotImplemented:
            return made_of_others
    flat = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, LateTensor)]
    devices = {tensor.device for tensor in flat if tensor.dim() or len(flat) == 1}
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "late":
        devices.add(_as_device(device))
    copies = func in (_aten.copy_.default, _aten._to_copy.default)
    assert len(devices) <= 1 or copies, f"{func} of tensors on several devices: {devices}"
    here = flat[0].device if flat else devices.pop()
    stream = current_stream(here)
    inner_args, inner_kwargs = tree_map(_inner, args), _on_host(tree_map(_inner, kwargs))
    schema = func._schema
    if func is _aten.copy_.default:
        return _copy(stream, *args, **kwargs)
    if func is _aten._to_copy.default:
        return _to(stream, args[0], **kwargs)
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    aliases = any(each.alias_info is not None for each in schema.returns)
    if written:
        _push(stream, lambda: func(*inner_args, **inner_kwargs), flat)
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        return named[written[0]] if schema.returns else None
    if aliases or func is _aten.detach.default:
        with torch.inference_mode(False):  # the thread that computes is in no such mode
            result = func(*inner_args, **inner_kwargs)
        return tree_map(lambda made: LateTensor(made, here, flat[0].block) if _is_tensor(made) else made, result)
    kernel = KERNELS.get(func)
    func = kernel or func
    try:
        if "batch_norm" in schema.name and kernel is None:
            raise NotImplementedError("what it says it returns is not what it returns")
        wanted = func(*tree_map(_meta, args), **{**tree_map(_meta, kwargs), **_meta_device(kwargs)})
        if not all(map(_is_tensor, tree_flatten(wanted)[0])):
            raise NotImplementedError
    except Exception:  # what it returns depends on the elements
        stream.synchronize()
        result = func(*inner_args, **inner_kwargs)
        return tree_map(lambda made: LateTensor(made, here, _Block(stream, made)) if _is_tensor(made) else made, result)
    outputs = tree_map(lambda like: _new(like.shape, like.stride(), like.dtype, here), wanted)

    def compute() -> None:
        found = func(*inner_args, **inner_kwargs)
        for output, result in zip(tree_flatten(outputs)[0], tree_flatten(found)[0], strict=True):
            output.inner.copy_(result)

    _push(stream, compute, [*flat, *tree_flatten(outputs)[0]])
    return outputs


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    inner = _inner(value)
    return torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device="meta")


def _meta_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if isinstance(kwargs.get("device"), torch.device) else {}


def _copy(stream: Stream, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to, of = _inner(target), _inner(source)
    both = [each for each in (target, source) if isinstance(each, LateTensor)]
    if len(both) == 2 and source.device != target.device:
        source.block.uses.recorded.add(stream)  # type: ignore[attr-defined]
        stream.wait_event(current_stream(source.device).record_event())
    if isinstance(target, LateTensor) and not isinstance(source, LateTensor) and not non_blocking:
        of = of.clone()
    _push(stream, lambda: to.copy_(of), both)
    if len(both) == 1 and not non_blocking:
        stream.synchronize()
    return target


def _to(stream: Stream, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    device = kwargs.pop("device", None) or source.device
    kwargs.pop("layout", None)
    kwargs.pop("pin_memory", None)
    non_blocking = kwargs.pop("non_blocking", False)
    like = _aten._to_copy.default(_meta(source), **kwargs)
    if device.type == "late":
        device = _as_device(device)
        made: torch.Tensor = _new(like.shape, like.stride(), like.dtype, device)
        return _copy(current_stream(device), made, source, non_blocking)
    with torch.inference_mode(False):
        host = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return _copy(stream, host, source)


# Registration


class _Module(registration._DummyBackendModule):  # type: ignore[misc]
    Stream = Stream
    Event = Event
    current_stream = staticmethod(current_stream)
    stream = staticmethod(_with_stream)
    device = staticmethod(_with_device)
    set_device = staticmethod(_set_device)
    synchronize = staticmethod(synchronize)

    def current_device(self) -> int:
        return _local.device

    def device_count(self) -> int:
        return DEVICES

    def is_current_stream_capturing(self) -> bool:
        return current_stream() in _captured


def _empty(size: Any, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> LateTensor:
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _new(like.shape, like.stride(), like.dtype, _as_device(device))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any) -> LateTensor:
    return _new(size, stride, dtype or torch.get_default_dtype(), _as_device(device))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    copied: torch.Tensor = _dispatch(_aten.copy_.default, (target, source), {"non_blocking": non_blocking})
    return copied


registration._setup_privateuseone_for_python_backend("late", backend_module=_Module())
_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
