"""Horovod in Ray Train: :class:`HorovodConfig` for ``DataParallelTrainer``, and for scripts of ``torch.distributed``
:class:`horovod.ray.train.torch.TorchConfig`.

    train_settings      what a user may set
    backend             called by Ray's controller when workers start and end: a job of fixed size
    elastic_backend     the same for an elastic job, in which Ray replaces single workers
    train_job           the launcher of an elastic job, on a thread of Ray's controller
    in_worker           what runs in Ray's workers around the training function
    reports             ``ray.train.report`` while ranks are lost
    torch               the configuration that makes a process group

Ray places, starts, watches and ends the workers, which are the ranks.
"""

from __future__ import annotations

try:
    import ray.train as _train  # noqa: F401  to say what to install
except ImportError as error:
    from horovod._bindings.frameworks import missing

    raise missing(error, "horovod.ray.train", "Ray Train", "ray", ", and pip install 'ray[train]'") from error

from horovod.ray.train.train_settings import HorovodConfig

__all__ = ["HorovodConfig"]
