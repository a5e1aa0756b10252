"""Tests wait for what must happen as long as ``time_limits`` says: a machine may have many times more to do than usual."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from time_limits import SOON

TESTS = Path(__file__).parents[1]
SHORTEST = 3.0
"""Shorter ones are for what must not happen, and for moments between two looks."""
WAITS = {"communicate", "get", "join", "result", "results", "run", "settimeout", "wait"}
OTHERS = {
    "engines.py": "what is left of threads that hang, once their test has failed",
    "parallel/test_device_engine.py": "how long a device takes",
    "unit/comm/nccl/test_communicator.py": "a wait inside of a call that others must not wait for",
}
"""Files with a shorter time that is no limit, and what it is."""


def limits(tree: ast.AST) -> Iterator[ast.expr]:
    """The time limits in calls that wait, and those that deadlines are made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from (each.value for each in node.keywords if each.arg == "timeout" and name in {*WAITS, "job"})
            if isinstance(node.func, ast.Attribute) and name in WAITS and len(node.args) == 1:
                yield node.args[0]
        elif isinstance(node, ast.BinOp) and getattr(getattr(node.left, "func", None), "attr", "") == "monotonic":
            yield node.right


def short(source: str) -> list[str]:
    """The lines of a file with a limit that a busy machine may reach."""
    return [
        f"line {each.lineno}: {each.value:g} s"
        for each in limits(ast.parse(source))
        if isinstance(each, ast.Constant) and isinstance(each.value, int | float) and SHORTEST <= each.value < SOON
    ]


def test_no_test_gives_up_early() -> None:
    found = {
        str(path.relative_to(TESTS)): lines
        for path in sorted(TESTS.rglob("*.py"))
        if (lines := short(path.read_text()))
    }
    assert found.keys() == OTHERS.keys(), f"use time_limits.SOON: {found}"


@pytest.mark.parametrize(
    "wait",
    [
        "process.wait(10)",
        "thread.join(5.0)",
        "job(2, check, timeout=60)",
        "subprocess.run(['ls'], timeout=100)",
        "end = time.monotonic() + 30",
    ],
)
def test_a_short_limit_is_found(wait: str) -> None:
    assert len(short(f"def test():\n    {wait}")) == 1
