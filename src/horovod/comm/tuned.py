"""The settings that may change while a job runs. All ranks change them between the same two collectives."""

from __future__ import annotations

import msgspec


class TunedSettings(msgspec.Struct, frozen=True, array_like=True):
    """One point of the space that autotuning searches (:mod:`horovod.autotune`).

    Attributes:
        fusion_threshold: bytes up to which tensors are fused into one batch; 0 turns fusion off.
        bucket_bytes: bytes of gradients that an optimizer submits at a time; 0 if the optimizer decides.
        engine: the engine for host memory; "" for the one that was chosen in ``init()``.
        shm_direct: whether the ranks of a host read one another's memory: "auto" (if that is faster), "always" or "never".
        hierarchical_allreduce, hierarchical_allgather: whether the hierarchical engine carries out the operation in three
            steps.
    """

    fusion_threshold: int
    bucket_bytes: int
    engine: str
    shm_direct: str
    hierarchical_allreduce: bool
    hierarchical_allgather: bool
