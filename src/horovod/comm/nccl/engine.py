"""Chooses and builds the engine ``nccl``: for ranks with a GPU each, if their framework gives access to device memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from horovod.comm.base import Communicator, DeviceFailure
from horovod.comm.datatypes import COMPLEX, FLOATING, DataType
from horovod.comm.device import DeviceRuntime
from horovod.comm.engine import Bootstrap, Engine, EngineError, EngineGroup
from horovod.comm.nccl import library
from horovod.comm.nccl.factors import device_holds, represents
from horovod.comm.reduction import OF_BITS, ReduceOp

SEVERAL_RANKS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable of NCCL 2.30 and newer that, set to 1, allows several ranks on one GPU. That is slow, and meant for tests."""

SERVES_SEVERAL = (2, 30, 0)
"""The oldest NCCL that serves several ranks on one GPU."""

ONE_EACH = (
    "NCCL needs one GPU for each rank, and counts MIG slices of one GPU as the same GPU: start at most as many ranks as "
    f"there are GPUs, or, with NCCL 2.30 or newer, set {SEVERAL_RANKS}=1"
)
"""Advice to users if several ranks share a GPU."""

_streams: WeakKeyDictionary[DeviceRuntime, Any] = WeakKeyDictionary()
_making = threading.Lock()


def stream_of(runtime: DeviceRuntime) -> Any:
    """The stream of a device that all of its communicators share."""
    with _making:
        if runtime not in _streams:
            with runtime.chosen():
                _streams[runtime] = runtime.new_stream()
        return _streams[runtime]


class NcclEngine(Engine):
    """Serves ranks with a GPU each, on any hosts."""

    name: ClassVar[str] = "nccl"

    def installed(self) -> str:
        return library.find()

    def not_alone(self) -> str:
        if os.environ.get(SEVERAL_RANKS) != "1":
            return ONE_EACH
        try:
            version = library.loaded().version()
        except (OSError, DeviceFailure):  # obstacle() reports it
            return ""
        if version >= library.code_of(SERVES_SEVERAL):
            return ""
        return f"{SEVERAL_RANKS}=1 needs NCCL 2.30 or newer, and this is NCCL {library.text_of(version)}"

    def obstacle(self, group: EngineGroup) -> str:
        facts = group.facts
        if facts.missing:
            return facts.missing
        if not library.find():
            try:
                library.loaded()
            except OSError as error:
                return str(error)
        return ""

    def lacks(
        self,
        data_types: Sequence[DataType],
        op: ReduceOp | None,
        scaled: bool,
        factor: float = 1.0,
        scales: bool = False,
    ) -> str:
        if op is None:
            return ""
        if op is ReduceOp.ADASUM:
            return "NCCL has no Adasum"
        if op in OF_BITS:
            return "NCCL does not reduce bits"
        for data_type in data_types:
            if data_type in COMPLEX or data_type.numpy not in library.DATA_TYPES:
                return f"NCCL does not reduce {data_type.label}"
            if scaled and data_type not in FLOATING:
                return f"NCCL does not scale {data_type.label} as hvd.allreduce does"
            dtype = data_type.numpy
            if scaled and not (represents(dtype, factor) or (scales and device_holds(dtype, factor))):
                return f"NCCL multiplies {data_type.label} by factors of that type, which cannot represent {factor:g}"
        if scaled and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            return f"NCCL has no {op.label} with factors"
        return ""

    def bootstrap(self, group: EngineGroup) -> Bootstrap:
        try:
            return Bootstrap(library.loaded().unique_id())
        except DeviceFailure as error:
            raise EngineError(str(error)) from error

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> Communicator:
        from horovod.comm.nccl.communicator import NcclCommunicator
        from horovod.comm.nccl.handle import CommHandle

        runtime = group.runtime
        if runtime is None:
            raise EngineError("this rank has used no device, so there is none to serve")
        if len(bootstrap.data) != library.UNIQUE_ID_BYTES:
            raise EngineError(
                f"the first rank sent a unique id of {len(bootstrap.data)} bytes, not of {library.UNIQUE_ID_BYTES}"
            )
        limit = group.settings.stall_timeout.total_seconds()
        try:
            handle = CommHandle.create(
                library.loaded(), runtime, group.rank, group.size, bootstrap.data, deadline, limit, group.meanwhile
            )
        except DeviceFailure as error:
            raise EngineError(f"{error}. The device is {runtime.device}.") from error
        return NcclCommunicator(group.rank, group.size, handle, runtime, stream_of(runtime))
