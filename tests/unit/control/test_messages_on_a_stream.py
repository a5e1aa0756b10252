"""Messages come out as they went in, whatever the pieces; an impossible length is refused before anything is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connections import frame
from horovod.control.channel import CONTROL_LIMIT, FrameError, FrameReader
from horovod.control.sealing import LENGTH_BYTES


@given(st.lists(st.binary(max_size=100), max_size=20), st.lists(st.integers(1, 60), max_size=50))
def test_messages_survive_any_cutting(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, messages))
    reader, found, position = FrameReader(), [], 0
    for cut in [*cuts, len(stream)]:
        found += reader.feed(stream[position : position + cut])
        position += cut
    assert found == messages


def test_messages_may_arrive_byte_by_byte() -> None:
    reader = FrameReader()
    stream = frame(b"abc") + frame(b"") + frame(b"d" * 300)
    found = [message for index in range(len(stream)) for message in reader.feed(stream[index : index + 1])]
    assert found == [b"abc", b"", b"d" * 300]


def test_a_message_of_exactly_the_limit_passes_and_one_more_byte_does_not() -> None:
    assert FrameReader(10).feed(frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(FrameError, match=r"11 bytes.*at most 10"):
        FrameReader(10).feed(frame(b"x" * 11))


def test_a_huge_length_is_refused_from_its_four_bytes_alone() -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(b"\xff" * LENGTH_BYTES)
    with pytest.raises(FrameError):
        FrameReader().feed((CONTROL_LIMIT + 1).to_bytes(LENGTH_BYTES, "big"))


def test_a_huge_length_behind_a_good_message_is_refused_too() -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(frame(b"fine") + b"\xff\xff\xff\xff")


@given(st.binary(max_size=300))
def test_garbage_never_grows_beyond_what_was_sent(data: bytes) -> None:
    try:
        messages = FrameReader(1000).feed(data)
    except FrameError:
        return
    assert sum(map(len, messages)) <= len(data)
