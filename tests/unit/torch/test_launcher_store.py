"""The store of an elastic job's process groups beside one of PyTorch's own, which does the same with the same calls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.server import RendezvousServer
from horovod.torch.distributed.launcher_store import LauncherStore
from horovod.torch.distributed.store import has_key
from time_limits import SOON

SECRET = b"s" * 32
_numbers = itertools.count()
KEYS = st.sampled_from(["a", "b", "c/d"])
VALUES = st.sampled_from([b"", b"1", b"other"])
_LACKS_CHECK = not hasattr(dist.HashStore, "check")
"""PyTorch 2.1 has no ``check`` in Python, and its ``compare_set`` ends the process."""
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES.filter(bool)),
    st.tuples(st.just("add"), st.sampled_from(["n", "m"]), st.integers(-3, 3)),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES.filter(bool)),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("append"), KEYS, VALUES.filter(bool)),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1)),
    st.tuples(st.just("get"), KEYS),
).filter(lambda call: not (_LACKS_CHECK and call[0] in ("check", "compare_set")))


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[[str], Any]]:
    server = RendezvousServer(SECRET)
    server.start()

    def made(prefix: str) -> Any:
        return LauncherStore(lambda: RendezvousClient(server.address, SECRET, SOON), lambda: prefix)

    with closing(made("first")) as store:
        store.check(["key"])  # the server runs
    yield made
    server.stop()


def outcome(store: Any, call: tuple[Any, ...]) -> Any:
    name, *arguments = call
    if name == "get" and not has_key(store, arguments[0]):
        return None  # it would wait
    if name == "compare_set":
        arguments = [each.decode() if isinstance(each, bytes) else each for each in arguments]
    if name in ("set", "append"):
        arguments[1] = arguments[1].decode()
    return getattr(store, name)(*arguments)


@settings(max_examples=100, deadline=None)
@given(calls=st.lists(CALLS, max_size=12))
def test_any_calls_have_the_results_of_pytorchs_own_store(
    calls: list[tuple[Any, ...]], make: Callable[[str], Any]
) -> None:
    theirs = dist.HashStore()
    with closing(make(f"{next(_numbers)}/")) as ours:
        through_c = dist.PrefixStore("default_pg", ours)  # as PyTorch's C++ code calls it
        assert [outcome(through_c, each) for each in calls] == [outcome(theirs, each) for each in calls]


def test_a_value_is_awaited_and_other_threads_use_the_store_meanwhile(make: Callable[[str], Any]) -> None:
    found: list[bytes] = []
    with closing(make("waits/")) as store:
        waiting = threading.Thread(target=lambda: found.append(store.get("late")))
        waiting.start()
        assert store.add("count", 2) == 2
        store.set("late", "here")
        waiting.join(SOON)
        assert found == [b"here"]
        assert store.num_keys() == 2


def test_a_value_that_does_not_come_is_an_error_that_names_it(make: Callable[[str], Any]) -> None:
    with closing(make("empty/")) as store:
        with pytest.raises(RuntimeError, match=r"no rank has stored 'never' within 0\.05 seconds"):
            store.wait(["never"], timedelta(seconds=0.05))


def test_adding_to_text_is_an_error_and_the_store_works_on(make: Callable[[str], Any]) -> None:
    with closing(make("text/")) as store:
        store.set("word", "x")
        with pytest.raises(RuntimeError, match="invalid literal"):
            store.add("word", 1)
        assert store.get("word") == b"x"
