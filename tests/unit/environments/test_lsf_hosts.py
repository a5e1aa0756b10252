"""The hosts of an LSF job, from the variables that LSF's manual names."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.environments.lsf_hosts import lsf_hosts


def test_outside_of_lsf_there_are_none() -> None:
    assert lsf_hosts({"LSB_MCPU_HOSTS": "a 1"}) is None


def test_hosts_and_slots_stand_in_lsfs_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("b\nb\na\nb\n")
    expected = [("b", 3), ("a", 1)]
    for variables in ({"LSB_MCPU_HOSTS": "b 3 a 1"}, {"LSB_DJOB_HOSTFILE": str(file)}, {"LSB_HOSTS": "b b a b"}):
        found = lsf_hosts({"LSB_JOBID": "7", **variables})
        assert found is not None and list(found.items()) == expected


def test_the_host_that_only_runs_the_script_is_left_out() -> None:
    assert lsf_hosts({"LSB_JOBID": "7", "CSM_ALLOCATION_ID": "1", "LSB_MCPU_HOSTS": "batch5 1 a 42 b 42"}) == {
        "a": 42,
        "b": 42,
    }


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LSB_MCPU_HOSTS": "a 1 b"}, "LSB_MCPU_HOSTS='a 1 b' is not of the form"),
        ({"LSB_MCPU_HOSTS": "a x"}, "LSB_MCPU_HOSTS"),
        ({"LSB_MCPU_HOSTS": "a 0"}, "LSB_MCPU_HOSTS"),
        (
            {"LSB_DJOB_HOSTFILE": "/no/such"},
            "the file /no/such that LSB_DJOB_HOSTFILE names cannot be read: No such file",
        ),
        ({}, "LSF names no host"),
    ],
)
def test_what_cannot_be_read_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lsf_hosts({"LSB_JOBID": "7", **variables})
