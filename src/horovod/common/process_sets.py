"""``horovod.common.process_sets``: subsets of ranks."""

from horovod.core.process_set import ProcessSet, global_process_set

__all__ = ["ProcessSet", "global_process_set"]
