"""The small functions that existing scripts import from ``horovod.common.util``."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.nccl import library
from horovod.common import basics, util
from horovod.common.basics import module_available

OPS = SimpleNamespace(Average=0, Sum=1)


def test_everything_that_is_promised_is_there() -> None:
    for name in util.__all__:
        assert callable(getattr(util, name))


@pytest.mark.parametrize(("number", "answer"), [(1, True), (2, True), (3, False), (64, True), (0, False), (-4, False)])
def test_powers_of_two(number: int, answer: bool) -> None:
    assert util.num_rank_is_power_2(number) is answer


@given(st.lists(st.integers(), max_size=50), st.integers(1, 20))
def test_a_list_is_cut_into_nearly_equal_parts_in_order(items: list[int], number: int) -> None:
    parts = util.split_list(items, number)
    assert len(parts) == number
    assert [item for part in parts for item in part] == items
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize(("thing", "answer"), [([], True), ("x", True), ({}, True), (iter(()), True), (5, False)])
def test_what_can_be_iterated(thing: object, answer: bool) -> None:
    assert util.is_iterable(thing) is answer


@pytest.mark.parametrize(
    ("version", "target", "answer"),
    [
        ("2.1.0", "2.0.0", True),
        ("2.1.0", "2.1.0", True),
        ("2.1.0", "2.1.1", False),
        ("2.10.0", "2.9.0", True),
        ("1.13.1+cu117", "1.13.1", True),
        ("2.0.0", "1.99.99", True),
    ],
)
def test_versions_are_compared_by_number(version: str, target: str, answer: bool) -> None:
    assert util.is_version_greater_equal_than(version, target) is answer


def test_variables_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TEST_KEPT", "before")
    monkeypatch.delenv("HOROVOD_TEST_NEW", raising=False)
    with pytest.raises(ZeroDivisionError), util.env(HOROVOD_TEST_KEPT="inside", HOROVOD_TEST_NEW="new"):
        assert os.environ["HOROVOD_TEST_KEPT"] == "inside"
        assert os.environ["HOROVOD_TEST_NEW"] == "new"
        raise ZeroDivisionError
    assert os.environ["HOROVOD_TEST_KEPT"] == "before"
    assert "HOROVOD_TEST_NEW" not in os.environ


def test_average_and_op_become_one() -> None:
    decide = util.get_average_backwards_compatibility_fun(OPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decide(None, None) == OPS.Average
        assert decide(OPS.Sum, None) == OPS.Sum
    with pytest.warns(DeprecationWarning):
        assert decide(None, True) == OPS.Average
    with pytest.warns(DeprecationWarning):
        assert decide(None, False) == OPS.Sum
    for average in (True, False):
        with pytest.raises(
            ValueError, match=r"The op parameter supersedes average\. Please provide only one of them\."
        ):
            decide(OPS.Sum, average)


def test_an_extension_needs_its_framework(capsys: pytest.CaptureFixture[str]) -> None:
    assert not util.extension_available("no_such_framework")
    assert capsys.readouterr().out == ""
    assert not util.extension_available("no_such_framework", verbose=True)
    assert "horovod.no_such_framework is not available" in capsys.readouterr().out
    assert not util.extension_available("json")  # there is such a module, but no binding for it


def test_looking_for_an_extension_does_not_import_its_framework() -> None:
    before = "torch" in sys.modules
    util.extension_available("torch")
    assert ("torch" in sys.modules) == before


def test_paths_of_extensions() -> None:
    path = util.get_extension_full_path("/a/b/__init__.py", "c", "lib")
    assert path == f"/a/b/c/lib{util.get_ext_suffix()}"
    assert importlib.machinery.EXTENSION_SUFFIXES[0] == util.get_ext_suffix()


def test_what_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", str)  # no NCCL, which PyTorch may bring
    assert util.gloo_built() is True
    assert util.ddl_built() is util.ccl_built() is False
    assert util.mpi_built() is module_available("mpi4py")
    assert util.nccl_built() == 0
    assert util.gpu_available("torch") is False


@pytest.mark.parametrize(("framework", "answer"), [("torch", True), ("tensorflow", True), ("mxnet", False)])
def test_with_nccl_frameworks_that_hand_over_their_tensors_can_use_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], framework: str, answer: bool
) -> None:
    monkeypatch.setattr(basics, "nccl_built", lambda: 22705)
    assert util.gpu_available(framework, verbose=True) is answer
    assert capsys.readouterr().out == f"GPU support of {framework} is {'' if answer else 'not '}available\n"


@pytest.mark.parametrize("name", ["mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built"])
def test_the_public_signature(name):
    getattr(util, name)(verbose=False)


@pytest.mark.parametrize("name", ["check_extension", "check_installed_version"])
def test_public_names_that_are_missing(name):
    assert hasattr(util, name)
