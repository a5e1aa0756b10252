"""Bytes in any portions become the same whole lines."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.output.lines import LineSplitter


def split(data: bytes, cuts: list[int], bound: int = 1 << 16) -> list[str]:
    splitter = LineSplitter(bound)
    lines: list[str] = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        lines += splitter.feed(data[start:end])
    return lines + splitter.finish()


texts = st.text(st.sampled_from("ab\n\r\u2028é\u4e2d\U0001f600"), max_size=60)


@given(texts, st.lists(st.integers(0, 1000), max_size=8))
def test_no_text_is_lost_and_every_line_has_one_end(text: str, cuts: list[int]) -> None:
    lines = split(text.encode(), cuts)
    assert all(re.fullmatch(r"[^\r\n]*[\r\n]", line) for line in lines)
    shown = [content for line in lines if (content := line[:-1])]
    assert shown == [part for part in re.split(r"[\r\n]+", text) if part]


@given(texts.filter(lambda text: "\r" not in text), st.lists(st.integers(0, 1000), max_size=8))
def test_without_carriage_returns_lines_are_just_lines(text: str, cuts: list[int]) -> None:
    assert "".join(split(text.encode(), cuts)) == text + ("\n" if text and not text.endswith("\n") else "")


@given(texts.filter(lambda text: "\r" not in text), st.lists(st.integers(0, 1000), max_size=8))
def test_lines_that_are_shown_before_they_are_complete_lose_and_repeat_nothing(text: str, cuts: list[int]) -> None:
    splitter, shown, data = LineSplitter(), "", text.encode()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        shown += "".join(splitter.feed(data[start:end]))
        if splitter.incomplete:
            shown += splitter.take_incomplete()
        assert not splitter.incomplete
    assert shown + "".join(splitter.finish()) == text + ("\n" if text and not text.endswith("\n") else "")


def test_a_progress_bar_that_was_shown_ends_where_the_next_begins() -> None:
    splitter = LineSplitter()
    assert (splitter.feed(b"\r50%"), splitter.take_incomplete()) == ([], "50%")
    assert (splitter.feed(b"\r51%"), splitter.take_incomplete()) == (["\r"], "51%")
    assert splitter.finish() == ["\n"]


@given(st.binary(max_size=80), st.lists(st.integers(0, 1000), max_size=8))
def test_bytes_that_are_no_text_are_replaced_however_they_arrive(data: bytes, cuts: list[int]) -> None:
    data = data.replace(b"\r", b"")
    text = data.decode("utf-8", "replace")
    assert "".join(split(data, cuts)) == text + ("\n" if text and not text.endswith("\n") else "")


@given(st.lists(st.integers(0, 30), max_size=5), st.lists(st.integers(0, 1000), max_size=5))
def test_long_lines_are_cut(lengths: list[int], cuts: list[int]) -> None:
    data = "".join("x" * length + "\n" for length in lengths)
    lines = split(data.encode(), cuts, bound=8)
    assert all(len(line) <= 8 + 1 for line in lines)
    assert sum(len(line) - 1 for line in lines) == sum(lengths)


def test_an_endless_line_shows_at_the_bound() -> None:
    splitter = LineSplitter(bound=4)
    assert splitter.feed(b"abc") == []
    assert splitter.feed(b"def") == ["abcd\n"]
    assert splitter.finish() == ["ef\n"]


def test_a_line_of_megabytes_stays_whole() -> None:
    splitter = LineSplitter()
    portions = [b"x" * (1 << 16)] * 64  # as a pipe delivers them; slow splitting would show here
    assert [line for portion in portions for line in splitter.feed(portion)] == []
    assert splitter.feed(b"\nnext\n") == ["x" * (1 << 22) + "\n", "next\n"]


@pytest.mark.parametrize(
    ("portions", "lines"),
    [
        ([b"a\r\nb"], ["a\n", "b\n"]),
        ([b"1%\r", b"2%\r", b"\n"], ["1%\r", "2%\r", "\n"]),  # shown at once, so the late end is a line of its own
        ([b"\r1%", b"\r2%", b"\n"], ["1%\r", "2%\n"]),
        ([b"", b""], []),
    ],
)
def test_progress_bars(portions: list[bytes], lines: list[str]) -> None:
    splitter = LineSplitter()
    assert [line for portion in portions for line in splitter.feed(portion)] + splitter.finish() == lines
