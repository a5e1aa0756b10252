"""``horovod.runner.common.util.timeout``: time limits, and their error."""

from horovod.runner.timeout import Timeout, TimeoutException

__all__ = ["Timeout", "TimeoutException"]
