"""A timeline as one page for a browser: the summary, and ranks over time. It needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources

from horovod.timeline.all_ranks import StepTotal
from horovod.timeline.report import (
    OPERATION_TITLES,
    RANK_TITLES,
    STEP_TITLES,
    TENSOR_TITLES,
    operation_table,
    overlap_sentences,
    rank_table,
    sentences,
    step_table,
    tensor_table,
)
from horovod.timeline.summary import Summary, waits

MOST_BATCHES = 20_000
"""The number of last batches that the page shows over time; its tables count all."""
_NAMED_TENSORS = 3


def page(summary: Summary, title: str, steps: Sequence[StepTotal] = ()) -> str:
    """The text of the page."""
    shown = summary.batches[-MOST_BATCHES:]
    data = {
        "batches": [
            [
                each.begun,
                each.ended,
                f"{each.operation.lower()} on {each.engine}, {each.bytes} bytes",
                ", ".join(tensor.tensor for tensor in each.tensors[:_NAMED_TENSORS])
                + (f" and {len(each.tensors) - _NAMED_TENSORS} more" if len(each.tensors) > _NAMED_TENSORS else ""),
            ]
            for each in shown
        ],
        "ranks": [[rank, intervals] for rank, intervals in waits(shown).items()],
    }
    left_out = len(summary.batches) - len(shown)
    facts = [*sentences(summary), *overlap_sentences(steps)] + (
        [f"The picture leaves out the first {left_out} batches."] if left_out else []
    )
    body = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in facts)
    tables = "".join(
        _table(titles, rows)
        for titles, rows in (
            (OPERATION_TITLES, operation_table(summary.operations)),
            (RANK_TITLES, rank_table(summary.ranks, summary.seconds)),
            (TENSOR_TITLES, tensor_table(summary.tensors)),
            *([(STEP_TITLES, step_table(steps))] if steps else []),
        )
    )
    # In a script no "<" may stand: a tensor's name could end the script.
    script = json.dumps(data).replace("<", "\\u003c")
    template = resources.files("horovod.timeline").joinpath("page.html").read_text(encoding="utf-8")
    before, rest = template.split("@facts@")
    middle, rest = rest.split("@tables@")
    more, after = rest.split("@data@")
    return before.replace("@title@", html.escape(title)) + body + middle + tables + more + script + after


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
