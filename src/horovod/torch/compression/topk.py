"""Top-k sparsification: only the largest elements of a gradient are sent. The rest is added to the next step's gradient.

Every rank selects its own elements. Their values and indices are gathered on all ranks and added up. Elements that are not sent
are stored and added in the next step (error feedback), so that every element is sent eventually. Without this, training would
stall.

Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017 (arXiv:1704.05021); Stich, Cordonnier
and Jaggi, "Sparsified SGD with Memory", 2018 (arXiv:1809.07599).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from horovod.torch.compression.bucket_compression import BucketCompressor, Collectives, Steps


class TopK(BucketCompressor):
    """``hvd.Compression.topk(ratio=0.01)``: sends the largest elements of each gradient, with error feedback.

    16-bit gradients are accumulated and sent in float32. It needs one allgather per bucket, and memory for one more copy of
    the gradients. Each rank receives 8 to 12 bytes per sent element from every rank.

    Args:
        ratio: the fraction of each gradient's elements that is sent, at least one element.

    Raises:
        ValueError: ``ratio`` is not above 0 and at most 1.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"the ratio of top-k compression must be above 0 and at most 1, not {ratio!r}")
        self.ratio = ratio

    def reduce(
        self, gradients: Mapping[str, torch.Tensor], memory: Mapping[str, dict[str, Any]], collectives: Collectives
    ) -> Steps:
        values: list[torch.Tensor] = []
        indices: list[torch.Tensor] = []  # in the concatenation of the gradients
        total = sum(gradient.numel() for gradient in gradients.values())
        wide = torch.float64 if any(each.dtype == torch.float64 for each in gradients.values()) else torch.float32
        if total == 0:
            return
        start = 0
        for name, gradient in gradients.items():
            waiting = gradient.reshape(-1).to(wide, copy=True)
            if "unsent" in memory[name]:
                waiting += memory[name]["unsent"]
            count = math.ceil(self.ratio * waiting.numel())
            chosen = waiting.abs().topk(count, sorted=False).indices
            values.append(waiting[chosen])
            indices.append(chosen + start)
            waiting[chosen] = 0
            memory[name]["unsent"] = waiting.nan_to_num_(0, 0, 0)  # an overflow must not affect later steps
            start += waiting.numel()
        narrow = torch.int32 if total <= 2**31 else torch.int64
        counts = sum(len(each) for each in values)
        value, index = yield collectives.allgather([torch.cat(values), torch.cat(indices).to(narrow)], "largest")
        dense = torch.zeros(total, dtype=wide, device=value.device)
        for begin in range(
            0, len(value), counts
        ):  # rank by rank; a rank's indices are unique, so all ranks get the same bits
            dense.index_add_(0, index[begin : begin + counts], value[begin : begin + counts])
        if collectives.average:
            dense /= collectives.size
        start = 0
        for gradient in gradients.values():
            gradient.copy_(dense[start : start + gradient.numel()].reshape(gradient.shape))
            start += gradient.numel()
