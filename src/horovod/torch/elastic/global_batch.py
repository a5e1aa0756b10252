"""``GlobalBatchSampler``: one global batch a step, of the same size for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, NamedTuple

from horovod.torch.elastic.sampler import ElasticSampler


class MicroBatch(NamedTuple):
    """The part of a step for one forward and backward pass of a rank.

    Attributes:
        data: the batch of the loader.
        weight: the factor for the mean loss of ``data``.
        last: whether it is this rank's last pass of the step; passes before it go inside ``optimizer.no_sync()``.
    """

    data: Any
    weight: float
    last: bool


class GlobalBatchSampler(ElasticSampler):
    """Divides global batches of a fixed size among the ranks: with fewer ranks each rank accumulates more, so that the learning
    rate and its schedule stay right when the size changes.

    Each step takes the next ``global_batch`` samples of the epoch's order and deals them to the ranks one by one, so the ranks'
    shares differ by at most one sample. A rank works through its share in micro-batches. With the weights, the average of the
    gradients over the ranks is the gradient of the mean loss over the global batch for any number of ranks, even if shares or
    micro-batches differ, and in the smaller last step of an epoch. No sample is used twice.

    It is a *batch sampler*, and has the state of an :class:`ElasticSampler`::

        sampler = hvd.elastic.GlobalBatchSampler(dataset, global_batch=256, micro_batch=32)
        loader = DataLoader(dataset, batch_sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
        ...
        for step in sampler.steps(loader):
            optimizer.zero_grad()
            for (x, y), weight, last in step:
                with contextlib.nullcontext() if last else optimizer.no_sync():
                    (F.cross_entropy(model(x), y) * weight).backward()
            optimizer.step()  # also on a rank without a share in a small last step
            sampler.record_step()
            state.commit()
        sampler.set_epoch(state.epoch + 1)

    The weights are for ``op=hvd.Average``, the optimizer's default.

    Args:
        dataset, shuffle, seed: as for :class:`ElasticSampler`.
        global_batch: the number of samples of one step over all ranks, at least the number of ranks.
        micro_batch: the largest number of samples of one pass, for limited memory; None: a rank's whole share.

    Raises:
        ValueError: not initialised; a number is not positive; or there are more ranks than samples in a batch.
    """

    def __init__(
        self, dataset: Sized, global_batch: int, micro_batch: int | None = None, shuffle: bool = True, seed: int = 0
    ) -> None:
        for name, value in {"global_batch": global_batch, "micro_batch": micro_batch}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self._steps: list[tuple[int, list[list[int]]]] = []
        super().__init__(dataset, shuffle, seed)

    def reset(self) -> None:
        super().reset()
        if self.global_batch < self.num_replicas:
            raise ValueError(
                f"global_batch={self.global_batch}: {self.num_replicas} ranks need at least one sample each"
            )
        self._steps = []
        for start in range(0, len(self.remaining_indices), self.global_batch):
            whole = self.remaining_indices[start : start + self.global_batch]
            share = whole[self.rank :: self.num_replicas]
            most = self.micro_batch or max(1, len(share))
            self._steps.append((len(whole), [share[at : at + most] for at in range(0, len(share), most)]))
        self.indices = [index for _, parts in self._steps for part in parts for index in part]
        self.num_samples = len(self.indices)
        self.total_size = len(self.remaining_indices)

    def steps(self, loader: Iterable[Any]) -> Iterator[Iterator[MicroBatch]]:
        """The rest of the epoch, step by step; all ranks have the same number of steps.

        Args:
            loader: over the data set, with this as its ``batch_sampler``.
        """
        batches = iter(loader)
        for samples, parts in list(self._steps):
            step = self._micro_batches(batches, samples, [len(part) for part in parts])
            yield step
            for _ in step:
                pass  # the loop has skipped some; those of the next step follow them

    def _micro_batches(self, batches: Iterator[Any], samples: int, lengths: list[int]) -> Iterator[MicroBatch]:
        for number, length in enumerate(lengths, 1):
            yield MicroBatch(next(batches), length * self.num_replicas / samples, number == len(lengths))

    def record_step(self) -> None:
        """Record that a step is complete. Every rank must call it, before ``state.commit()``."""
        self.processed_num = min(self.processed_num + self.global_batch, len(self.dataset))

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Not supported: the ranks may have different numbers of batches.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("GlobalBatchSampler counts steps: call record_step() once after each")

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part for _, parts in self._steps for part in parts])

    def __len__(self) -> int:
        return sum(len(parts) for _, parts in self._steps)
