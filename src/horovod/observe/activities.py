"""The names of engines' activities in the timeline, as tools that read timelines know them.

Those tools know the engines MPI, NCCL, oneCCL and Gloo. Horovod's own engines do what Gloo does in jobs without MPI, so their
activities have Gloo's names. The event's arguments name the engine itself.
"""

from __future__ import annotations

_FAMILIES = {"mpi": "MPI", "nccl": "NCCL", "ccl": "CCL"}
_SHORT = {"BROADCAST": "BCAST"}
_FIXED = {"ADASUM": "MPI_ADASUM_ALLREDUCE"}
_IRREGULAR = {("GLOO", "ALLTOALL"): "MPI_ALLTOALL"}


def activity(engine: str, operation: str) -> str:
    """The name of the activity when ``engine`` (a communicator's name) runs ``operation`` (an operation's name)."""
    if operation in _FIXED:
        return _FIXED[operation]
    family = _FAMILIES.get(engine, "GLOO")
    return _IRREGULAR.get((family, operation)) or f"{family}_{_SHORT.get(operation, operation)}"
