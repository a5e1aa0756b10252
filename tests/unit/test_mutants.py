"""tools/mutants.py, which changes the sources at random."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

import mutants

ROOT = Path(__file__).parents[2]

MODULE = '''
def total(numbers: list[int], most: int = 7) -> int:
    """The sum of those below 10."""
    found = 0
    for number in numbers:
        if number < 10 and not -number in (1, 2):
            found += number
    note(found, most)
    if found is None:
        raise ValueError(f"{found + 1} is odd")
    return found
'''


def test_each_kind_of_place_is_changed_and_messages_defaults_and_types_are_not() -> None:
    found = {(each.line, each.before, each.after) for each in mutants.mutants(MODULE)}
    assert found == {
        (4, "0", "1"),
        (6, "number < 10 and not -number in (1, 2)", "(not (number < 10 and not -number in (1, 2)))"),
        (6, "number < 10 and not -number in (1, 2)", "((number < 10) or (not -number in (1, 2)))"),
        (6, "number < 10", "(number <= 10)"),
        (6, "10", "11"),
        (6, "-number in (1, 2)", "(-number not in (1, 2))"),
        (6, "1", "2"),
        (6, "2", "3"),
        (7, "found += number", "None"),
        (8, "note(found, most)", "None"),
        (8, "found, most", "most, found"),
        (9, "found is None", "(not (found is None))"),
        (9, "found is None", "(found is not None)"),
    }


def test_a_mutant_of_a_module_is_another_program() -> None:
    path = random.choice(sorted((ROOT / "src/horovod").rglob("*.py")))
    original = path.read_text()
    program = ast.dump(ast.parse(original))
    found = list(mutants.mutants(original))
    for mutant in random.sample(found, min(20, len(found))):
        assert mutant.text.splitlines()[: mutant.line - 1] == original.splitlines()[: mutant.line - 1], (path, mutant)
        assert ast.dump(ast.parse(mutant.text)) != program, (path, mutant)


def test_the_areas_have_sources_and_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for area in ["draws", *mutants.AREAS]:
        modules, tests = mutants.chosen(area, random.Random(1))
        assert modules and all(Path(test).exists() for test in tests), area
