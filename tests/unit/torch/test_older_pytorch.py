"""What older versions of PyTorch need of a group of this back end, with the version that is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from horovod.core.requests.handle import Handle
from horovod.torch.distributed import next_membership, work
from horovod.torch.distributed.base import BackendGroup
from horovod.torch.distributed.destruction import WatchedGroups
from horovod.torch.distributed.store import has_key

KEYS = st.sets(st.sampled_from("abcd"))


class StoreWithoutCheck:
    """What PyTorch 2.1 offers to Python of a store."""

    def __init__(self, store: Any) -> None:
        self.add, self.wait = store.add, store.wait


@given(KEYS, KEYS)
def test_a_store_without_check_has_the_same_keys(written: set[str], asked: set[str]) -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # from a star import
    for key in written:
        store.set(key, "value")
    for _ in range(2):
        assert {key for key in asked if has_key(StoreWithoutCheck(store), key)} == written & asked
        assert {key for key in asked if has_key(store, key)} == written & asked


def test_a_store_that_cannot_be_used_is_an_error() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("connection reset")

    with pytest.raises(RuntimeError, match="connection reset"):
        has_key(StoreWithoutCheck(SimpleNamespace(add=fail, wait=fail)), "a")


@pytest.mark.parametrize("ask", ["wait", "get_future"])
def test_a_work_is_kept_until_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    monkeypatch.setattr(work, "_KEPT_BY_CPP", False)
    handles = [Handle() for _ in range(3)]
    for handle in handles:
        handle.complete()
    made = [work.HorovodWork(handle, None, [torch.ones(1)], "all_reduce") for handle in handles]
    assert [*work.unawaited] == made
    for count, each in enumerate(made, 1):
        getattr(each, ask)()
        assert [*work.unawaited] == made[count:]
        getattr(each, ask)()


class Group(BackendGroup):
    def __init__(self, ended: list[Group]) -> None:
        self.ended = ended

    def shutdown(self) -> None:
        self.ended.append(self)


def test_groups_are_shut_down_when_pytorch_removes_them_from_its_table() -> None:
    ended: list[Group] = []
    first, second, third = (Group(ended) for _ in range(3))
    groups = WatchedGroups({first: 1, "of another back end": 2, second: 3, third: 4})
    del groups[second]
    assert ended == [second] and second not in groups
    groups.clear()
    assert ended == [second, third, first] and not groups


def test_a_default_group_of_another_size_is_refused_where_ddp_would_divide_by_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_membership, "SIZE_CHANGES", False)
    group: Any = SimpleNamespace(size=lambda: 3)
    found: Any = SimpleNamespace(ranks=[0, 1])
    with pytest.raises(RuntimeError, match=r"had 3 ranks, and now there are 2, .* divide gradients by 3"):
        next_membership.adopt(group, found, None, "")
