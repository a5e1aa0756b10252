"""Finds calls that only some ranks make: those inside an ``if`` on the rank. Pure, except for reading source files."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_RANKS = {"rank", "local_rank", "cross_rank", "get_rank"}
"""Functions that answer differently on every rank, and the names that variables with their results have."""


class RankCondition(NamedTuple):
    """An ``if`` that depends on the rank: its line, and the text of the condition."""

    line: int
    text: str


def condition_at(file: str, line: int) -> RankCondition | None:
    """The condition on the rank under which a file's line is carried out; None if there is none, or no source."""
    source = "".join(linecache.getlines(file))
    return rank_condition(source, line) if source else None


def rank_condition(source: str, line: int) -> RankCondition | None:
    """The same of a source text.

    A call that stands in both branches is made by all ranks, so it is no finding.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in reversed(list(_enclosing(tree, line))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            return None  # the caller is in another frame
        if isinstance(node, ast.If | ast.IfExp) and _asks_for_rank(node.test):
            body: Sequence[ast.AST] = node.body if isinstance(node, ast.If) else [node.body]
            other: Sequence[ast.AST] = node.orelse if isinstance(node, ast.If) else [node.orelse]
            if any(_spans(each, line) for each in other) and not any(_spans(each, line) for each in body):
                body, other = other, body
            if not _called_at(body, line) & _called_in(other):
                return RankCondition(node.lineno, ast.unparse(node.test))
    return None


def _enclosing(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """The nodes around a line, the outermost first; not those whose condition is on the line, but whose branches are not."""
    for child in ast.iter_child_nodes(node):
        if _spans(child, line):
            if not isinstance(child, ast.If) or any(_spans(each, line) for each in (*child.body, *child.orelse)):
                yield child
            yield from _enclosing(child, line)


def _spans(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


def _asks_for_rank(test: ast.AST) -> bool:
    return any(
        (isinstance(each, ast.Name) and each.id in _RANKS) or (isinstance(each, ast.Attribute) and each.attr in _RANKS)
        for each in ast.walk(test)
    )


def _called_at(nodes: Sequence[ast.AST], line: int) -> set[str]:
    """The names of the functions that are called in a line."""
    return {name for node in nodes for call, name in _calls(node) if _spans(call, line)}


def _called_in(nodes: Sequence[ast.AST]) -> set[str]:
    return {name for node in nodes for _, name in _calls(node)}


def _calls(node: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            called = each.func
            yield each, called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
