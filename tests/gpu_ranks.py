"""Where tests run on real GPUs: on how many, with which NCCL, and in what processes.

Ranks share the GPUs that there are. NCCL 2.30 and newer serve several ranks on one, in turns, which is right and slow. The
processes are forked from none that has imported a framework, and do not import the stand-in of a device: that becomes PyTorch's
accelerator, and autograd would leave the streams of GPUs alone.
"""

from __future__ import annotations

from horovod.comm.base import DeviceFailure
from horovod.comm.nccl import library
from horovod.comm.nccl.engine import SERVES_SEVERAL, SEVERAL_RANKS

RANKS = 3
"""The most that a test has."""

HOST = {"TEST_DEVICES": "gpu", "HOROVOD_GPU_OPERATIONS": "HOST"}
NCCL = {"TEST_DEVICES": "gpu", "HOROVOD_GPU_OPERATIONS": "NCCL"}


def why_not_nccl(gpus: int) -> str:
    """Why tests of NCCL cannot run on so many GPUs, "" where they can."""
    if not gpus:
        return "there is no CUDA or ROCm device"
    try:
        version = library.loaded().version()
    except (OSError, DeviceFailure) as error:
        return str(error)
    if gpus < RANKS and version < library.code_of(SERVES_SEVERAL):
        wanted = library.text_of(library.code_of(SERVES_SEVERAL))
        return f"{gpus} GPUs serve {RANKS} ranks with NCCL {wanted} or newer, and this is {library.text_of(version)}"
    return ""


def nccl_env(gpus: int) -> dict[str, str]:
    """The environment of ranks that must use NCCL."""
    return {**NCCL, SEVERAL_RANKS: "1"} if gpus < RANKS else NCCL
