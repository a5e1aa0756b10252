"""A name has one meaning in the tree, of a class or of a module. Bindings share the names that users know, and engines,
launchers and programs the names of their parts."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import horovod

SOURCE = Path(horovod.__file__).parent

PUBLIC = {
    "BF16Compressor", "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "CollectiveTimeoutError",
    "CommitStateCallback", "Compression", "Coordinator", "EngineFailureError", "FP16Compressor", "HorovodInternalError",
    "KerasState",
    "LearningRateScheduleCallback", "LearningRateWarmupCallback", "MetricAverageCallback", "MismatchError",
    "RankLostError", "RankRaisedError", "RendezvousServer", "UpdateBatchStateCallback", "UpdateEpochStateCallback",
}  # fmt: skip
"""Names of the interface, which each binding has for its framework."""


def files_by_class() -> dict[str, list[str]]:
    """By name, the files that define a class of that name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(SOURCE)))
    return found


def test_a_class_name_has_one_meaning() -> None:
    several = {name: files for name, files in files_by_class().items() if len(files) > 1 and name not in PUBLIC}
    assert not several, f"a name for two things: {several}"


PARTS = {
    "__init__", "__main__", "base", "communicator", "engine", "library", "runtime",  # of engines and launchers
    "allgather", "allreduce", "alltoall", "broadcast", "reducescatter",  # of ops
    "arguments", "errors", "submission", "tensors",
    "adasum", "callbacks", "compression", "debugging", "device", "elastic", "functions", "gradients",  # of bindings
    "mpi_ops", "optimizer", "settings", "state", "sync_batch_norm", "util",
    "all_ranks", "collectives", "plot", "report", "stragglers",  # of programs, and what they read
    "messages",  # of each pair that exchanges them
    "compute_service", "failures", "jsrun", "secret", "single", "supervisor",  # two sides of one thing
    "handle",  # of a request, and of a communicator of NCCL
}  # fmt: skip
"""Names of modules that parallel folders have for the same part."""


def test_a_module_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        if "_old_paths" not in path.parts:
            found[path.stem].append(str(path.relative_to(SOURCE)))
    several = {name: files for name, files in found.items() if len(files) > 1 and name not in PARTS}
    assert not several, f"a name for two things: {several}"
