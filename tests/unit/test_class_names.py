"""A class name has one meaning in the tree. Public classes of several bindings share the name that users know."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import horovod

SOURCE = Path(horovod.__file__).parent

PUBLIC = {
    "BF16Compressor", "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "CollectiveTimeoutError",
    "CommitStateCallback", "Compression", "EngineFailureError", "FP16Compressor", "HorovodInternalError", "KerasState",
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
