"""Functions and results on their way between the caller and its ranks."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner import remote_call
from horovod.runner.remote_call import RemoteCall


@given(st.binary(max_size=50), st.integers(1, 20))
def test_large_values_go_in_parts(data: bytes, part: int) -> None:
    stored = remote_call.to_parts("key", data, part)
    assert all(len(value) <= part for key, value in stored if key != "key")
    assert stored[-1][0] == "key"  # who sees it finds all parts
    assert remote_call.from_parts("key", dict(stored).get) == data


def test_a_value_that_was_not_stored_is_none() -> None:
    assert remote_call.from_parts("key", {}.get) is None


def test_the_function_may_import_what_its_caller_could(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/callers/own", *sys.path])
    task = remote_call.loads(remote_call.dumps(RemoteCall.of(lambda: list(sys.path), (), {})))
    monkeypatch.setattr(sys, "path", ["/ranks/own"])
    assert task.run()[0] == "/callers/own"


def test_another_python_keeps_its_own_packages_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/callers/own", *sys.path])
    task = RemoteCall.of(lambda: list(sys.path), (), {})
    monkeypatch.setattr(sys, "prefix", "/another")
    monkeypatch.setattr(sys, "path", ["/ranks/own", *sys.path[1:]])
    assert task.run()[0] == "/ranks/own"
    assert task.run()[-1] == "/callers/own"
