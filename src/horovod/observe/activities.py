"""What the timeline calls the work of an engine: names that tools which read timelines know.

Those tools know the engines MPI, NCCL, oneCCL and Gloo. Horovod's own engines do what Gloo did in jobs without MPI, and so
bear its names; which engine it really was stands beside the name, in the event's arguments.
Source: the contract of the public interface for the runtime, section 6.
"""

from __future__ import annotations

_FAMILIES = {"mpi": "MPI", "nccl": "NCCL", "ccl": "CCL"}
_SHORT = {"BROADCAST": "BCAST"}
_REGARDLESS = {"ADASUM": "MPI_ADASUM_ALLREDUCE"}
_IRREGULAR = {("GLOO", "ALLTOALL"): "MPI_ALLTOALL"}


def activity(engine: str, operation: str) -> str:
    """The name of the activity when ``engine`` (a communicator's name) runs ``operation`` (an operation's name)."""
    if operation in _REGARDLESS:
        return _REGARDLESS[operation]
    family = _FAMILIES.get(engine, "GLOO")
    return _IRREGULAR.get((family, operation)) or f"{family}_{_SHORT.get(operation, operation)}"
