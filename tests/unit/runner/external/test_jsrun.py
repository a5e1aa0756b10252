"""What jsrun is given."""

from __future__ import annotations

import pytest

from horovod.runner.errors import UsageError
from horovod.runner.external.jsrun import command_line, rank_file
from horovod.runner.hosts.slots import HostInfo, get_host_assignments
from horovod.runner.options import Options


def test_each_rank_has_its_host_and_its_share_of_the_cores() -> None:
    slots = get_host_assignments([HostInfo("a", 2), HostInfo("b", 2)], 3, 3)
    assert rank_file(slots, {"a": 42, "b": 42}, 4) == (
        "overlapping_rs: allow\n"
        "cpu_index_using: logical\n"
        "\n"
        "rank: 0: { hostname: a; cpu: {0-83} ; gpu: * ; mem: * }\n"
        "rank: 1: { hostname: a; cpu: {84-167} ; gpu: * ; mem: * }\n"
        "\n"
        "rank: 2: { hostname: b; cpu: {0-167} ; gpu: * ; mem: * }\n"
    )


def test_more_ranks_than_cores_have_one_each() -> None:
    slots = get_host_assignments([HostInfo("a", 2)], 2, 2)
    assert "cpu: {1-1}" in rank_file(slots, {"a": 1}, 1)


def test_the_users_arguments_reach_jsrun() -> None:
    job = ("python", "train.py")
    assert command_line(Options(command=job), "f") == ["jsrun", "--erf_input", "f", *job]
    given = Options(command=job, binding_args="-n 4 -a 1", output_filename="o", mpi_args="-x", tcp_flag=True)
    assert command_line(given, "f") == [
        "jsrun", "-n", "4", "-a", "1", "--stdio_stderr", "o", "--stdio_stdout", "o", "--smpiargs", "-tcp -x", *job,
    ]  # fmt: skip


def test_a_quotation_mark_that_is_not_closed_is_refused_and_the_flag_is_named() -> None:
    with pytest.raises(UsageError, match=r"--binding-args=.*No closing quotation"):
        command_line(Options(command=("true",), binding_args="-n '4"), "f")
