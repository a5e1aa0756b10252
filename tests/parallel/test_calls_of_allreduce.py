"""The design page says how much an allreduce runs through."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from count_calls_of_allreduce import LARGE, SMALL, count, files
from ranks import RankPool

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
ROOM = 1.1
ATTEMPTS = 5
"""A call for which a rank is late enters some functions more. Of so many calls one is mostly not late, but on a loaded machine
all may be, and then they are made again."""


@pytest.mark.parametrize(
    ("nbytes", "calls", "words"),
    [
        (SMALL, 200, r"a tensor of 4 KB enters (\d+) files and (\d+) functions"),
        (LARGE, 100, r"a tensor of 40 MB about (\d+) and (\d+)"),
    ],
    ids=["4 KB", "40 MB"],
)
def test_an_allreduce_enters_no_more_functions_than_the_design_page_says(
    nbytes: int, calls: int, words: str, ranks: Callable[..., RankPool]
) -> None:
    said = re.search(words, DESIGN.read_text())
    assert said is not None
    most_files, most_functions = ROOM * int(said[1]), ROOM * int(said[2])
    found = []
    for _ in range(ATTEMPTS):
        found = count(ranks(2, framework="torch"), nbytes, named=False, calls=calls)
        if len(files(found)) <= most_files and len(found) <= most_functions:
            return
    pytest.fail(
        f"{len(files(found))} files and {len(found)} functions, at the most {most_files:g} and {most_functions:g}: {found}"
    )
