"""docs/environment.md says of every variable what _base/config.py does with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from horovod._base import config
from horovod._base.config import Config

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "horovod"
DECLARED_IN = Path(config.__file__)
TABLE = ROOT / "docs" / "environment.md"
NAME = re.compile(r"_?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")


@cache
def sources() -> dict[Path, str]:
    """The text of each module."""
    return {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}


@cache
def words() -> dict[Path, frozenset[str]]:
    """The names and numbers in each module."""
    return {path: frozenset(re.findall(r"\w+", text)) for path, text in sources().items()}


def documented() -> dict[str, str]:
    """By variable, what its row says: honoured, accepted, refused or not read."""
    found: dict[str, str] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[2] in ("honoured", "accepted", "refused", "not read"):
            for name in re.findall(r"`([^`]*)`", cells[0]):
                assert name not in found, f"{name} stands there twice"
                found[name] = cells[2]
    return found


def known() -> dict[str, str]:
    """By variable, the name of its constant in config.py."""
    return {
        value: constant
        for constant, value in vars(config).items()
        if constant.isupper() and isinstance(value, str) and NAME.fullmatch(value)
    }


def readers(constant: str) -> list[Path]:
    """Modules that use a constant, or the setting or function that config.py makes of it."""
    text = DECLARED_IN.read_text()
    setting = re.search(rf"(\w+): .* = _setting\({constant}\b", text)
    functions = re.findall(rf"^def (\w+)\(env:(?:(?!^def |^class )[\s\S])*?\b{constant}\b", text, re.MULTILINE)
    uses = rf"\b{constant}\b" + (rf"|config\.{setting[1]}\b" if setting else "")
    uses += "".join(rf"|\b{function}\((?!env:)" for function in functions)
    handing_on = {"tunables.py", "worker_environment.py", "config.py"}
    named = {constant, *functions, *([setting[1]] if setting else [])}
    candidates = [path for path, found in words().items() if path.name not in handing_on and named & found]
    return [path for path in candidates if re.search(uses, sources()[path])]


def test_every_variable_that_is_known_is_documented_and_no_other_is_said_to_be_read() -> None:
    table = documented()
    assert {name for name, status in table.items() if status != "not read"} == set(known())
    assert len(table) > 50


@pytest.mark.parametrize("name", [name for name, status in documented().items() if status == "honoured"])
def test_what_is_honoured_is_used_somewhere(name: str) -> None:
    assert readers(known()[name])


@pytest.mark.parametrize("name", [name for name, status in documented().items() if status == "not read"])
def test_variables_that_are_not_read_appear_nowhere(name: str) -> None:
    assert not [path for path, found in words().items() if name in found]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (config.FUSION_THRESHOLD, "fusion_threshold"),
        (config.CACHE_CAPACITY, "cache_capacity"),
        (config.START_TIMEOUT, "start_timeout"),
        (config.TIMEOUT_SECONDS, "timeout"),
        (config.STALL_CHECK_TIME, "stall_warning_time"),
        (config.STALL_SHUTDOWN_TIME, "stall_shutdown_time"),
        (config.DEADLOCK_TIME, "deadlock_time"),
        (config.CYCLE_TIME, "cycle_time"),
    ],
)
def test_the_defaults_of_the_table(name: str, setting: str) -> None:
    (row,) = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    shown = row.split("|")[2].strip()
    default = getattr(Config(), setting)
    seconds = getattr(default, "total_seconds", None)
    assert float(shown) == (seconds() if seconds else default)


@pytest.mark.parametrize("value", ["gloo", "Gloo", ""])
def test_the_controller_that_scripts_may_ask_for(value: str) -> None:
    assert Config.from_env({config.CONTROLLER: value}) == Config()


@pytest.mark.parametrize("name", [name for name, status in documented().items() if status == "refused"])
@pytest.mark.parametrize("value", ["nccl", "MPI", "anything"])
def test_what_is_refused_is_an_error_that_says_what_to_do(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}='{value}': there is no such .* Correct it or unset it"):
        Config.from_env({name: value})


def literals(tree: ast.AST) -> Iterator[str]:
    """The strings of a module that it uses: all but docstrings, which document and cannot be put together."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Reads HOROVOD_RANK."""', []),
        ('NAME = "HOROVOD_RANK"', ["HOROVOD_RANK"]),
        ('f"set HOROVOD_{kind} to 1"', ["set HOROVOD_", " to 1"]),
        ('def f():\n    """HOROVOD_RANK"""\n    raise ValueError("set HOROVOD_" "RANK")', ["set HOROVOD_RANK"]),
    ],
)
def test_what_counts_as_a_literal(source: str, found: list[str]) -> None:
    assert list(literals(ast.parse(source))) == found


def test_a_variable_is_named_in_one_place() -> None:
    """Other modules import its name, so no text speaks of a variable that is not there. Docstrings name what is declared."""
    named: dict[str, list[str]] = {}
    undeclared: dict[str, set[str]] = {}
    for path in set(SOURCE.rglob("*.py")) - {DECLARED_IN}:
        text, module = path.read_text(), str(path.relative_to(SOURCE))
        named[module] = [literal for literal in literals(ast.parse(text)) if "HOROVOD_" in literal]
        undeclared[module] = set(re.findall(r"\bHOROVOD_[A-Z0-9_]*[A-Z0-9]\b", text)) - set(known())
    assert len(named) > 100
    assert not {module: found for module, found in named.items() if found}
    assert not {module: found for module, found in undeclared.items() if found}


def test_the_variables_that_must_be_the_same_on_all_ranks_are_listed() -> None:
    said = re.search(r"must be the same on all ranks: (.+?)\. Otherwise", TABLE.read_text(), re.DOTALL)
    assert said is not None
    assert sorted(re.findall(r"`(\w+)`", said[1])) == sorted(Config().common())
