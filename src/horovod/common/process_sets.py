"""``horovod.common.process_sets``: subsets of ranks."""

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set, membership
from horovod.core.submission.dynamic_process_sets import add_process_set, remove_process_set

__all__ = ["ProcessSet", "_temp_process_set_object", "add_process_set", "global_process_set", "remove_process_set"]


def _temp_process_set_object(process_set_id: int) -> ProcessSet:
    """A process set for callers that have only its number. It is not registered again.

    Raises:
        ValueError: no process set has this number.
    """
    if process_set_id == 0:
        return global_process_set
    if process_set_id not in membership.ranks:
        raise ValueError(f"Process set {process_set_id} does not exist, or has not been registered.")
    made = ProcessSet(membership.ranks[process_set_id])
    made.process_set_id = process_set_id
    return made
