"""The errors that users catch, and the import path under which they know them."""

from __future__ import annotations

import pickle

import pytest

from horovod.common import exceptions
from horovod.core import errors


def test_a_failed_collective_is_a_runtime_error() -> None:
    assert issubclass(errors.HorovodInternalError, RuntimeError)


@pytest.mark.parametrize("skip_sync", [True, False])
def test_changed_hosts_say_whether_to_synchronise(skip_sync: bool) -> None:
    error = errors.HostsUpdatedInterrupt(skip_sync)
    assert isinstance(error, RuntimeError)
    assert error.skip_sync is skip_sync


def test_a_version_mismatch_names_both_versions() -> None:
    error = errors.HorovodVersionMismatchError("torch", "2.1", "1.9")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.1", "1.9")
    for part in ("torch", "2.1", "1.9"):
        assert part in str(error)
    assert str(error) == errors.get_version_mismatch_message("torch", "2.1", "1.9")


@pytest.mark.parametrize("kind", errors.KINDS)
def test_a_failed_collective_says_what_it_is_about_in_every_copy(kind: type[errors.HorovodInternalError]) -> None:
    error = kind("it failed", ranks=[3, 1], tensor="loss", call_sites={1: "train.py:8"}, reason="because")
    copies = [
        error,
        error.again(),
        pickle.loads(pickle.dumps(error)),
        errors.recall(f"{kind.__name__}: it failed\n at line"),
    ]
    for each in copies:
        assert type(each) is kind and str(each) == "it failed"
        assert each.ranks == (1, 3) and each.tensor == "loss" and each.call_sites == {1: "train.py:8"}
        assert each.reason == "because"
    assert str(error.extended("And more.")) == "it failed And more." and error.extended("").ranks == (1, 3)
    assert str(error) == "it failed"


def test_an_error_of_which_little_is_known_has_its_text_for_a_reason() -> None:
    error = errors.HorovodInternalError("it failed")
    assert (error.ranks, error.tensor, error.call_sites, error.reason) == ((), "", {}, "it failed")
    assert errors.HorovodInternalError().reason == ""


def test_no_error_is_recalled_that_was_not_raised_here() -> None:
    assert errors.recall("a text of another process") is None


def test_the_public_names_are_these_objects() -> None:
    for name in exceptions.__all__:
        assert getattr(exceptions, name) is getattr(errors, name)
