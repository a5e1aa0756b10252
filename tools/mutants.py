"""Whether ``make test`` finds what ``make test-all`` finds: mutation testing of the files that leave variants to the second.

    python tools/mutants.py --seed 1 --minutes 60 [AREA ...]

Changes one random place of the sources after another, and runs the tests of its area on each mutant: the part that ``make
test`` runs, and, where that passes, all variants. For each mutant one line says ``found``, ``found by all variants alone`` or
``not found``; many of the last kind are found by other tests, or behave alike. Run it after variants have moved, in a clone of
its own with the environment of that active: a mutant may loop, and leave processes and files. Exit code 1: variants alone found
one.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = Path("src/horovod")
_RANKS, _TORCH, _LOOPS = "tests/parallel", "tests/parallel/torch", "tests/loops"
AREAS = {
    "engines": ("comm core/worker", f"{_RANKS}/test_engines.py {_RANKS}/test_many_ranks.py"),
    "compression": ("comm/compression", f"{_RANKS}/test_compressed_allreduce.py"),
    "torch": ("torch", f"{_TORCH}/test_optimizer_equality.py {_LOOPS}/test_pytorch_loops.py {_LOOPS}/test_random_programs.py"),
    "distributed": ("torch/distributed", f"{_TORCH}/test_distributed_operations.py"),
    "keras": ("_keras", f"{_RANKS}/keras"),
    "keras_loops": ("_keras", f"{_LOOPS}/test_keras_loops.py"),
    "tensorflow": ("tensorflow", f"{_LOOPS}/test_tensorflow_loops.py"),
}  # fmt: skip
"""Folders of sources, and the tests that leave variants of them to ``make test-all``. Beside these, ``draws``: a file of
tests/unit that draws fewer cases, and the modules that it imports."""
ALONE = "found by all variants alone"
SECONDS = {"part": 400, "all": 900}
"""How long a run may take."""

_OPPOSITE: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.Div: "*",
}  # fmt: skip
_DANGEROUS = ("kill", "rmtree", "unlink", "remove", "setsid", "prctl")
"""What must not be called with other arguments, by a part of its name."""


class Mutant(NamedTuple):
    """A text with one place changed.

    Attributes:
        line: where, counted from 1.
        before, after: the source of the place.
        text: the whole.
    """

    line: int
    before: str
    after: str
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """Each mutant of a module: another operator, a condition negated, a number one larger, a flag turned over, the first two
    arguments of a call exchanged, a call or an augmented assignment left out. Messages of errors, default values and type
    annotations stay.
    """
    for first, last, after in _places(ast.parse(text), text):
        lines = text.encode().splitlines(keepends=True)
        begin = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
        end = sum(map(len, lines[: (last.end_lineno or 0) - 1])) + (last.end_col_offset or 0)
        before = text.encode()[begin:end].decode()
        changed = (text.encode()[:begin] + after.encode() + text.encode()[end:]).decode()
        if not any(
            name in line for name in _DANGEROUS for line in text.splitlines()[first.lineno - 1 : last.end_lineno]
        ):
            yield Mutant(first.lineno, before, after, changed)


def _places(node: ast.AST, text: str) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt, str]]:
    """From where to where something can be changed, and to what."""

    def source(part: ast.AST) -> str:
        return ast.get_source_segment(text, part) or ""

    match node:
        case ast.Raise() | ast.JoinedStr() | ast.arguments():
            return
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.If(test=test) if "TYPE_CHECKING" in source(test):
            return
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, test, f"(not ({source(test)}))"
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _OPPOSITE:
            yield node, node, f"({source(left)} {_OPPOSITE[type(operator)]} {source(right)})"
        case ast.BoolOp(op=operator, values=values):
            yield node, node, "(" + f" {_OPPOSITE[type(operator)]} ".join(f"({source(each)})" for each in values) + ")"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPPOSITE and not isinstance(
            left, ast.JoinedStr
        ):
            yield node, node, f"({source(left)} {_OPPOSITE[type(operator)]} {source(right)})"
        case ast.Constant(value=bool(flag)):
            yield node, node, str(not flag)
        case ast.Constant(value=int(number)):
            yield node, node, str(number + 1)
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred) and not isinstance(
            second, ast.Starred
        ):
            if source(first) != source(second):
                yield first, second, f"{source(second)}, {source(first)}"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, node, "None"
        case _:
            pass
    children = (child for name, field in ast.iter_fields(node) if name not in ("annotation", "returns", "decorator_list")
                for child in (field if isinstance(field, list) else [field]))  # fmt: skip
    for child in children:
        if isinstance(child, ast.AST):
            yield from _places(child, text)


def chosen(area: str, rng: random.Random) -> tuple[list[Path], list[str]]:
    """Modules of an area, any of which may be changed, and its tests."""
    if area == "draws":
        while True:
            test = rng.choice(
                [path for path in sorted(Path("tests/unit").rglob("test_*.py")) if "draws(" in path.read_text()]
            )
            if modules := list(_imported(test)):
                return modules, [str(test)]
    folders, tests = AREAS[area]
    modules = [path for folder in folders.split() for path in sorted((SOURCES / folder).rglob("*.py"))]
    elsewhere = {"mpi", "nccl", "cuda", "oneccl"}  # engines that have tests of their own
    return [path for path in modules if not elsewhere & set(path.parts)], tests.split()


def _imported(test: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod."):
            module = Path("src", *str(node.module).split("."))
            yield from filter(
                Path.exists, [module.with_suffix(".py"), *(module / f"{name.name}.py" for name in node.names)]
            )


def passes(tests: list[str], part: str) -> bool:
    """Whether the tests pass on the sources as they are.

    Raises:
        subprocess.TimeoutExpired: they have not ended in time.
    """
    environment = {**os.environ, "HOROVOD_TEST_ALL": "1" if part == "all" else ""}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--maxfail", "1", *tests]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            return process.wait(SECONDS[part]) == 0
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # nothing is left of it


def outcome(tests: list[str]) -> str:
    """Which tests find the mutant that stands in the sources."""
    try:
        if not passes(tests, "part"):
            return "found"
    except subprocess.TimeoutExpired:
        return "found"  # it hangs, for they pass in time without it
    try:
        return "not found" if passes(tests, "all") else ALONE
    except subprocess.TimeoutExpired:
        return "too slow to say"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("areas", nargs="*", choices=["draws", *AREAS], default=["draws", *AREAS], metavar="AREA")
    options = parser.parse_args()
    if subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, check=True).stdout:
        parser.error("there are changes in src: commit them first")
    rng, until, lost, number = random.Random(options.seed), time.monotonic() + 60 * options.minutes, 0, 0
    passing: list[list[str]] = []
    while time.monotonic() < until:
        area = options.areas[number % len(options.areas)]
        number += 1
        modules, tests = chosen(area, rng)
        if tests not in passing:
            if not passes(tests, "part"):
                parser.error(f"these tests fail without any change, so they would find every mutant: {' '.join(tests)}")
            passing.append(tests)
        path = rng.choices(modules, [each.stat().st_size for each in modules])[0]
        original = path.read_text()
        if not (each := list(mutants(original))):
            continue
        mutant = rng.choice(each)
        began = time.monotonic()
        try:
            path.write_text(mutant.text)
            found = outcome(tests)
        finally:
            path.write_text(original)
        lost += found == ALONE
        change = f"{mutant.before!r} -> {mutant.after!r}"
        print(f"{found}: {area} {path}:{mutant.line}: {change} ({time.monotonic() - began:.0f} s)", flush=True)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
