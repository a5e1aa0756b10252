"""``ElasticSampler``: uses each sample of an epoch once, even if the number of ranks changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from horovod.common.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[Any]):
    """Divides a data set among the ranks, and continues within an epoch after a change of ranks.

    All ranks have one order of the epoch. Its first ``processed_num`` samples are processed. The rest is dealt to the ranks one
    by one, so after each step the processed samples are again the first ones of the order. After a change of size the rest is
    dealt to the new ranks. So every sample of an epoch is in exactly one recorded batch, with one exception: if the rest is not
    a multiple of the number of ranks, up to ``size - 1`` samples are used a second time at the end, because all ranks make the
    same number of steps. A batch that was being computed when a rank was lost is not recorded, and is used again.

    The sampler communicates nothing. Give it to a ``TorchState`` and to a ``DataLoader``, call :meth:`record_batch` after each
    batch and before ``state.commit()``, and :meth:`set_epoch` at the **end** of an epoch::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
        ...
        for number, (x, y) in enumerate(loader):
            step(x, y)
            state.sampler.record_batch(number, batch_size)
            state.commit()
        state.sampler.set_epoch(state.epoch + 1)

    Args:
        dataset: anything with a length, the same on every rank.
        shuffle: True: another order in each epoch. False: the order of the data set.
        seed: the seed of the orders, the same on all ranks.

    Attributes:
        epoch, processed_num: the epoch, and the number of processed samples of its order, over all ranks.
        num_replicas, rank: the size of the job and this process's rank, as of the last :meth:`reset`.
        remaining_indices: the rest of the epoch's order.
        indices: this rank's part of the rest.
        num_samples, total_size: the number of samples in the parts of one rank and of all ranks, including samples that are
            used twice.

    Raises:
        ValueError: Horovod is not initialised.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()  # scripts look at it; nothing is kept there
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, of which no sample is processed yet.

        Call it at the end of the epoch before, not at the start of a loop, which may continue within an epoch.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch. Every rank must call it, after the step.

        Args:
            batch_idx: accepted for compatibility.
            batch_size: the batch size of one rank. For a smaller last batch, too, it is that of the loader.
        """
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position of the data. A running iteration is not affected."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch among the present ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = self._part(self.remaining_indices)

    def _part(self, remaining: list[int]) -> list[int]:
        repeats = -(-self.total_size // max(1, len(remaining)))
        return (remaining * repeats)[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.indices))

    def __len__(self) -> int:
        return self.num_samples
