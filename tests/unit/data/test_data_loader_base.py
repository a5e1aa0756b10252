"""Loaders derived from ``horovod.data.data_loader_base``, as training scripts and estimators derive them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader


class Loader(BaseDataLoader):
    def __init__(self, batches: int, fails_at: int = -1) -> None:
        self.batches = batches
        self.fails_at = fails_at
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.batches

    def _iterate(self) -> Iterator[int]:
        for number in range(self.batches):
            self.threads.add(threading.current_thread().name)
            if number == self.fails_at:
                raise ValueError("no such batch")
            yield number

    def _process_batch(self, batch: Any) -> Any:
        return batch * 10


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass


def test_a_loader_gives_its_batches_processed() -> None:
    loader = Loader(3)
    assert len(loader) == 3
    assert [list(loader), list(loader)] == [[0, 10, 20]] * 2


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_loader_with_a_thread_gives_the_same_epoch_after_epoch(size: int) -> None:
    loader = AsyncLoader(async_loader_queue_size=size, batches=3)
    assert [list(loader), list(loader)] == [[0, 10, 20]] * 2
    loader.close_async_loader()
    assert loader.threads == ({"horovod-data-loader"} if size else {threading.current_thread().name})


def test_an_exception_of_the_thread_reaches_the_training_loop() -> None:
    loader = AsyncLoader(async_loader_queue_size=2, batches=3, fails_at=1)
    found = []
    with pytest.raises(ValueError, match="no such batch"):
        for batch in loader:
            found += [batch]
    assert found == [0]
    loader.close_async_loader()


def test_a_loader_can_be_closed_in_the_middle_of_an_epoch() -> None:
    loader = AsyncLoader(async_loader_queue_size=1, batches=1000)
    assert next(iter(loader)) == 0
    loader.close_async_loader()
    loader.close_async_loader()
