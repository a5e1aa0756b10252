"""Writes what the ranks did as PyTorch's flight recorder does, so that its analyser (``torchfrtrace``) and other tools read it.

Format: a pickled dictionary a rank, of the version below, as PyTorch documents it in its tutorial on the flight recorder.
PyTorch numbers collectives by submission. Here they have the numbers in which the ranks carried them out, which are the same on
all ranks; those that are not carried out yet follow. PyTorch has no field for a collective's name: it is that of the innermost
frame.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from horovod.diagnose.dumped_job import DumpedJob
from horovod.observe.dump import CollectiveRecord, DumpError, RankDump

VERSION = "2.10"
PREFIX = "rank_"
_NAMES = {
    "ALLREDUCE": "all_reduce",
    "ADASUM": "all_reduce",
    "ALLGATHER": "all_gather_v",
    "BROADCAST": "broadcast",
    "ALLTOALL": "all_to_all_v_single",
    "REDUCESCATTER": "reduce_scatter_v",
    "BARRIER": "barrier",
    "JOIN": "barrier",
}
_DTYPES = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float16": "Half",
    "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "bool": "Bool", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64",
}  # fmt: skip
_BY_ROWS = ("ALLGATHER", "ALLTOALL", "REDUCESCATTER")


def write_traces(job: DumpedJob, folder: Path) -> None:
    """One file a rank, ``rank_<number>``.

    Raises:
        DumpError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, dump in job.dumps.items():
            (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(trace(job, rank, dump)))
    except OSError as error:
        raise DumpError(f"{folder} cannot be written: {error.strerror}") from error


def trace(job: DumpedJob, rank: int, dump: RankDump) -> dict[str, Any]:
    """The content of a rank's file."""
    entries: list[dict[str, Any]] = []
    status: dict[str, dict[str, int]] = {}
    for each in dump.process_sets:
        records = job.collectives(rank, each.id)
        carried_out = sorted((record for record in records if record.order), key=lambda record: record.order)
        waiting = [record for record in records if not record.order and record.ended is None]
        numbered = [(record.order, record) for record in carried_out]
        numbered += [(each.carried_out + position, record) for position, record in enumerate(waiting, 1)]
        entries += [_entry(job, rank, number, record) for number, record in numbered]
        status[str(each.id)] = {
            "last_enqueued_collective": numbered[-1][0] if numbered else -1,
            "last_started_collective": each.carried_out or -1,
            "last_completed_collective": max(
                (record.order for record in records if record.ended is not None), default=-1
            ),
        }
    return {
        "version": VERSION,
        "pg_config": {
            str(each.id): {"name": str(each.id), "desc": f"process set {each.id}", "ranks": str(each.ranks)}
            for each in dump.process_sets
        },
        "pg_status": status,
        "entries": entries,
    }


def _entry(job: DumpedJob, rank: int, number: int, record: CollectiveRecord) -> dict[str, Any]:
    file, _, line = record.call_site.rpartition(":")
    sizes = [_size(record.operation, tensor.shape) for tensor in record.tensors] or [[]]
    dtypes = [_DTYPES.get(tensor.dtype, tensor.dtype) for tensor in record.tensors] or ["Byte"]
    state = "scheduled" if record.order == 0 else "started" if record.ended is None else "completed"
    shift = job.dumps[rank].unix - job.dumps[rank].monotonic

    def nanoseconds(moment: float | None) -> int | None:
        return None if moment is None else round((moment + shift) * 1e9)

    return {
        "record_id": number,
        "pg_id": record.process_set,
        "process_group": (str(record.process_set), f"process set {record.process_set}"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"gloo:{_NAMES[record.operation]}",
        "time_created_ns": nanoseconds(record.submitted),
        "time_discovered_started_ns": nanoseconds(record.started),
        "time_discovered_completed_ns": nanoseconds(record.ended),
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "state": state,
        "is_p2p": False,
        "retired": record.ended is not None,
        "timeout_ms": 0,
        "frames": [{"name": record.name, "filename": file, "line": int(line) if line.isdecimal() else 0}],
    }


def _size(operation: str, shape: list[int]) -> list[int]:
    """A shape as all ranks have to agree on it: rows may differ in the operations that deal in rows."""
    return shape[1:] if operation in _BY_ROWS else shape
