"""Hosts, slots, and who goes where."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.hosts.slots import (
    INVALID_SLOT_INFO,
    HostInfo,
    SlotInfo,
    get_host_assignments,
    parse_host_files,
    parse_hosts,
)

names = st.from_regex(r"[a-z][a-z0-9.-]{0,10}", fullmatch=True)
hosts = st.lists(st.builds(HostInfo, names, st.integers(1, 6)), min_size=1, max_size=6, unique_by=lambda h: h.hostname)


@given(hosts)
def test_hosts_survive_being_written_and_parsed(wanted: list[HostInfo]) -> None:
    assert parse_hosts(",".join(f"{host.hostname}:{host.slots}" for host in wanted)) == wanted


def test_a_user_can_be_named_and_is_no_part_of_the_hosts_name() -> None:
    (host,) = parse_hosts("me@a:2,me@a:1")
    assert (host.hostname, host.slots, host.login) == ("a", 3, "me@a")
    with pytest.raises(ValueError, match="different users: me@a and a"):
        parse_hosts("me@a:2,a:1")


def test_a_host_named_twice_has_the_sum_of_its_slots() -> None:
    assert parse_hosts("a:1,b:2,a:3") == [HostInfo("a", 4), HostInfo("b", 2)]


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":2", "a:b", "a:-1", "a:1:2", "a b:1", "a:1,", "a:0", "[::1]:2", "a:²"]
)
def test_what_is_no_host_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="invalid host"):
        parse_hosts(text)


@given(hosts, st.data())
def test_assignments_are_a_topology(wanted: list[HostInfo], data: st.DataObject) -> None:
    available = sum(host.slots for host in wanted)
    size = data.draw(st.integers(1, available))
    slots = get_host_assignments(wanted, size, size)
    assert [slot.rank for slot in slots] == list(range(size))
    assert {slot.size for slot in slots} == {size}
    order = list(dict.fromkeys(slot.hostname for slot in slots))
    assert order == [host.hostname for host in wanted][: len(order)]  # hosts fill up in their order
    per_host = Counter(slot.hostname for slot in slots)
    for slot in slots:
        assert slot.local_size == per_host[slot.hostname]
        peers = [other for other in slots if other.local_rank == slot.local_rank]
        assert slot.cross_size == len(peers)
        assert peers[slot.cross_rank] == slot
    for hostname in order:
        assert [slot.local_rank for slot in slots if slot.hostname == hostname] == list(range(per_host[hostname]))


def test_without_a_maximum_every_slot_is_taken() -> None:
    assert len(get_host_assignments([HostInfo("a", 2), HostInfo("b", 2)], 1)) == 4


def test_too_few_slots() -> None:
    with pytest.raises(ValueError, match=r"Requested more processes \(3\) than there are available slots \(2\)"):
        get_host_assignments([HostInfo("a", 2)], 3)


def test_the_response_string() -> None:
    slot = SlotInfo(hostname="a", rank=1, local_rank=2, cross_rank=3, size=4, local_size=5, cross_size=6)
    assert slot.to_response_string() == "1,4,2,5,3,6"
    assert INVALID_SLOT_INFO.to_response_string() == "-1,-1,-1,-1,-1,-1"


def test_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\n\na slots=2\n  b   slots = 3 # fast\n")
    assert parse_host_files(file) == "a:2,b:3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb\n", "line 2: 'b'"),
        ("a slots=x", "line 1"),
        ("a slots=1\nb:0\n", "line 2: 'b:0': a host needs"),
        ("\n", "names no host"),
    ],
)
def test_a_hostfile_that_does_not_parse(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_host_files(file)


def test_a_hostfile_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        parse_host_files(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not text"):
        parse_host_files(tmp_path / "binary")
