"""``horovod.common.process_sets``: subsets of ranks."""

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.submission.dynamic_process_sets import add_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
