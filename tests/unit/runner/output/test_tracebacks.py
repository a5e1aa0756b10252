"""A traceback that several ranks print is shown once, and no line is lost."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.output.tracebacks import ShownTracebacks, TracebackFilter

BEGIN = "Traceback (most recent call last):\n"
STACKS = {
    line: [f'  File "train.py", line {line}, in <module>\n', "    hvd.allreduce(x)\n", "    ^^^^^^^^^^^^^^^^\n"]
    for line in (3, 5)
}
MISMATCH = [
    "horovod.core.errors.MismatchError: One rank sent [2], but another rank sent [3], as each rank submitted it:\n",
    "  rank 0: [2] at train.py:3\n",
    "  rank 1: [3] at train.py:5\n",
]


def shown(*streams: list[str], apart: float = 0.0) -> list[list[str]]:
    """What is shown of the lines of each stream, one stream after the other."""
    tracebacks = ShownTracebacks()
    found = []
    for rank, lines in enumerate(streams):
        stream = TracebackFilter(f"[{rank}]", tracebacks)
        found.append(stream.feed(lines, rank * apart) + stream.release(rank * apart))
    return found


def test_a_traceback_is_shown_once_and_others_refer_to_it() -> None:
    traceback = [BEGIN, *STACKS[3], *MISMATCH]
    first, *others = shown(traceback, traceback, ["hello\n", *traceback])
    assert first == traceback
    reference = "The same traceback as [0] above: horovod.core.errors.MismatchError\n"
    assert others == [[reference], ["hello\n", reference]]


def test_another_stack_is_shown_without_the_message() -> None:
    _, second, third = shown(*([BEGIN, *STACKS[line], *MISMATCH] for line in (3, 5, 5)))
    assert second == [BEGIN, *STACKS[5], "horovod.core.errors.MismatchError: the same text as [0] above\n"]
    assert third == ["The same traceback as [0] above: horovod.core.errors.MismatchError\n"]


def test_what_follows_the_message_is_shown_and_a_short_message_is_not_replaced() -> None:
    noise = ["[W ProcessGroup.cpp:1] destroyed\n"]
    assert shown([BEGIN, *STACKS[3], *MISMATCH], [BEGIN, *STACKS[3], *MISMATCH, *noise])[1][1:] == noise
    other = [BEGIN, *STACKS[5], "KeyError: 'x'\n"]
    assert shown([BEGIN, *STACKS[3], "KeyError: 'x'\n"], other)[1] == other


def test_a_chain_of_errors_is_one_line_and_the_prefix_of_torch_distributed_is_no_difference() -> None:
    chain = [
        BEGIN,
        *STACKS[3],
        "KeyError: 1\n",
        "\n",
        "During handling of the above exception, another occurred:\n",
        "\n",
    ]
    chain += [BEGIN, *STACKS[5], *MISMATCH]
    prefixed = [[line if line == "\n" else f"[rank{rank}]: {line}" for line in chain] for rank in range(2)]
    assert shown(*prefixed) == [
        prefixed[0],
        ["[rank1]: The same traceback as [0] above: horovod.core.errors.MismatchError\n"],
    ]


def test_a_rank_that_repeats_itself_or_comes_late_is_shown() -> None:
    traceback = [BEGIN, *STACKS[3], *MISMATCH]
    assert shown(traceback + traceback)[0] == traceback + traceback
    assert shown(traceback, traceback, apart=60)[1] == traceback


def test_a_prompt_and_a_progress_bar_end_the_wait() -> None:
    for line in ("(Pdb) ", "50%\r"):
        stream = TracebackFilter("[0]", ShownTracebacks())
        assert stream.feed([BEGIN, *STACKS[3]], 0) == [] and stream.holds
        assert stream.feed([line], 0) == [BEGIN, *STACKS[3], line] and not stream.holds


PIECES = st.sampled_from(
    [
        ["hello\n"],
        ["  indented\n"],
        ["\n"],
        ["50%\r"],
        [BEGIN],
        *STACKS.values(),
        MISMATCH,
        MISMATCH[:2],
        ["KeyError: 'x'\n"],
    ]
)


@given(st.lists(st.tuples(st.integers(0, 2), PIECES, st.booleans()), max_size=40))
def test_every_line_is_shown_or_stands_where_a_line_refers_to(events: list[tuple[int, list[str], bool]]) -> None:
    tracebacks = ShownTracebacks()
    streams = [TracebackFilter(f"[{rank}]", tracebacks) for rank in range(3)]
    given: list[list[str]] = [[], [], []]
    found: list[list[str]] = [[], [], []]
    for rank, lines, release in events:
        given[rank] += lines
        found[rank] += streams[rank].feed(lines, 0)
        if release:
            found[rank] += streams[rank].release(0)
    for rank in range(3):
        found[rank] += streams[rank].release(0)
    for rank in range(3):
        references = [int(each[1]) for line in found[rank] if (each := re.search(r" as \[(\d)\] above", line))]
        kept = iter([line for line in found[rank] if not re.search(r" as \[\d\] above", line)])
        expected = next(kept, None)
        for line in given[rank]:
            if line == expected:
                expected = next(kept, None)
            else:
                assert any(line in found[other] for other in references), "a line is lost"
        assert expected is None, "lines keep their order"
        assert rank not in references
