"""What ``horovodrun --check-build`` shows: the frameworks and engines that could be used here. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

import horovod

# Each row: what it is called, and the modules it needs: our own room and the libraries it stands on.
_TABLE: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "Available Frameworks": (
        ("TensorFlow", ("horovod.tensorflow", "tensorflow")),
        ("PyTorch", ("horovod.torch", "torch")),
        ("MXNet", ("horovod.mxnet", "mxnet")),
    ),
    "Available Controllers": (
        ("MPI", ("horovod.comm.mpi", "mpi4py")),
        ("Gloo", ()),  # the name that scripts know for "no MPI needed": the built-in one
    ),
    "Available Tensor Operations": (
        ("NCCL", ("horovod.comm.nccl", "nccl")),
        ("DDL", ("horovod.comm.ddl",)),
        ("CCL", ("horovod.comm.oneccl", "oneccl")),
        ("MPI", ("horovod.comm.mpi", "mpi4py")),
        ("Gloo", ("horovod.comm.gloo", "torch")),
        ("Shared memory (built in)", ("horovod.comm.shm.communicator",)),
        ("TCP (built in)", ("horovod.comm.tcp.communicator",)),
    ),
}


def check_build(*, verbose: bool = False) -> str:
    """The table as text; with ``verbose`` it says beside each missing row what is missing."""
    lines = [f"Horovod v{horovod.__version__}:"]
    for title, rows in _TABLE.items():
        lines += ["", f"{title}:"]
        for name, modules in rows:
            missing = [module for module in modules if not _importable(module)]
            reason = f"    needs {_reason(missing)}" if missing and verbose else ""
            lines.append(f"    [{' ' if missing else 'X'}] {name}{reason}")
    return "\n".join(lines)


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _reason(missing: list[str]) -> str:
    if any(module.startswith("horovod.") for module in missing):
        return "a later version of Horovod"
    return " and ".join(missing)
