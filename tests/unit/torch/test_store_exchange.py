"""All-gathers through a store: values by rank, whoever comes when; who is missing is named on all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from horovod.control.rendezvous.messages import RendezvousError
from horovod.core.errors import HorovodInternalError
from horovod.torch.distributed.store import StoreExchange
from time_limits import SOON


def _store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]  # from a star import


def exchange(store: Any, rank: int, size: int, seconds: float = SOON) -> list[list[bytes]]:
    made = StoreExchange(store, rank, size, "the_call()")
    found = [made.all_gather("one", b"%d" % rank, seconds), made.all_gather("two", b"", seconds)]
    made.end()
    return found


def test_every_rank_gets_the_values_of_all_also_again_in_the_same_store() -> None:
    store = _store()
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda rank: exchange(store, rank, 4), range(4)))
        assert found == [[[b"0", b"1", b"2", b"3"], [b""] * 4]] * 4


@pytest.mark.parametrize(("present", "told"), [([0, 2], "ranks 1, 3 of 4"), ([1, 2, 3], "rank 0 of 4")])
def test_missing_ranks_are_named(present: list[int], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.torch.distributed.store._PATIENCE_SECONDS", 0.2)
    store = _store()

    def meet(rank: int) -> str:
        with pytest.raises(TimeoutError) as raised:
            exchange(store, rank, 4, 0.2)
        return str(raised.value)

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(meet, present))
    assert all(f"{told} did not call the_call() within 0.2 seconds" in text for text in texts), texts


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_the_job_ends_the_wait(rank: int) -> None:
    seen = []

    def check() -> None:
        seen.append(rank)
        if len(seen) == 3:
            raise HorovodInternalError("rank 2 failed")

    made = StoreExchange(_store(), rank, 3, "the_call()", check=check)
    with pytest.raises(HorovodInternalError, match="rank 2 failed"):
        made.all_gather("one", b"", SOON)


def test_what_another_version_has_written_is_told() -> None:
    store = _store()
    made = StoreExchange(store, 1, 2, "the_call()")
    store.set("horovod/groups/1.1/one/all", b"\xc1")
    with pytest.raises(RendezvousError, match="install the same version"):
        made.all_gather("one", b"", 1.0)


def test_a_group_of_one_asks_nobody() -> None:
    assert exchange(_store(), 0, 1, 0.0) == [[b"0"], [b""]]
