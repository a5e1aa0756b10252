"""The design page says how much a call runs through."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from count_calls import CALLS, count, files
from ranks import RankPool

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
ROOM = 1.1
ATTEMPTS = 5
"""A call for which a rank is late enters some functions more. Of so many calls one is mostly not late, but on a loaded machine
all may be, and then they are made again."""

SAID = {
    call: (int(functions), int(of))
    for call, functions, of in re.findall(
        r"^\| ([^|]+?) +\| (\d+) functions in (\d+) files", DESIGN.read_text(), re.MULTILINE
    )
}


def test_the_design_page_speaks_of_calls_that_can_be_counted() -> None:
    assert len(SAID) >= 4 and set(SAID) <= set(CALLS)


@pytest.mark.parametrize("call", SAID)
def test_a_call_enters_no_more_functions_than_the_design_page_says(call: str, ranks: Callable[..., RankPool]) -> None:
    most_functions, most_files = (ROOM * number for number in SAID[call])
    found = []
    for _ in range(ATTEMPTS):
        found = count(ranks(2, framework="torch"), call, calls=40 if "40 MB" in call else 200)
        if len(files(found)) <= most_files and len(found) <= most_functions:
            return
    pytest.fail(
        f"{len(files(found))} files and {len(found)} functions, at the most {most_files:g} and {most_functions:g}: {found}"
    )
