"""Writes the reference of the public interface, ``docs/api/<page>.md``, from signatures and docstrings: ``make docs``.

A binding gets its page by a line in ``PAGES``. The pages are built and not kept in git: they would be a second copy of every
docstring, stale after each change of one, while whoever has the source has the command. A test builds them all.

Only the standard library is needed, and what the pages are about. Docstrings are read as this project writes them: prose
with ``literals`` and :role:`names`, sections such as ``Args:``, simple tables, and indented code after ``::``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Page:
    """One page of the reference.

    Attributes:
        name: of the file, without ``.md``.
        module: whose ``__all__`` it tells about.
        title: its headline.
        needs: the framework without which the module cannot be imported.
        parts: by a headline, classes that users get to see but never name, whose public methods stand under it.
    """

    name: str
    module: str
    title: str
    needs: str = ""
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)


PAGES = (
    Page("run", "horovod", "`horovod`: starting a job from Python"),
    Page(
        "torch",
        "horovod.torch",
        "`horovod.torch`: Horovod for PyTorch",
        needs="torch",
        parts={
            "What a distributed optimizer has": (
                "horovod.torch.optimizer.gradient_optimizer.GradientOptimizer",
                "horovod.torch.optimizer.wrapped.WrappedOptimizer",
            )
        },
    ),
    Page("tensorflow", "horovod.tensorflow", "`horovod.tensorflow`: Horovod for TensorFlow", needs="tensorflow"),
    Page("keras", "horovod.keras", "`horovod.keras`: Horovod for Keras 3", needs="keras"),
    Page(
        "tensorflow-keras",
        "horovod.tensorflow.keras",
        "`horovod.tensorflow.keras`: Horovod for tf.keras",
        needs="tensorflow",
    ),
    Page("mxnet", "horovod.mxnet", "`horovod.mxnet`: Horovod for MXNet", needs="mxnet"),
)

SECTIONS = (
    ("Starting and ending", r"run|init|shutdown|is_initialized"),
    ("Who is who", r"((local|cross)_)?(rank|size)|is_homogeneous"),
    ("Training", r"Distributed\w+|broadcast_(parameters|optimizer_state|variables|global_variables)|SyncBatch\w+"),
    ("Making gradients smaller", r"\w*Compress(ion|or)"),
    ("Reducing", r"\w*allreduce\w*"),
    ("Kinds of reduction", r"Average|Sum|Adasum|Min|Max|Product"),
    ("RendezvousGroup", r"(grouped_)?allgather(_async)?"),
    ("Broadcasting", r"broadcast(_async)?_?"),
    ("Exchanging rows", r"alltoall\w*"),
    ("Reducing and scattering", r"\w*reducescatter\w*"),
    ("Python objects", r"\w+_object\w*"),
    ("Waiting for results", r"poll|synchronize"),
    ("Waiting for ranks", r"join|barrier"),
    ("Process sets", r"\w*process_set\w*|ProcessSet"),
    ("The timeline", r"\w+_timeline"),
    ("Errors", r"\w+(Error|Interrupt)"),
    ("What this installation can do", r"\w+_(built|enabled|supported)|build_info|__version__"),
    ("More", r".*"),
)
"""Headlines, and the names that stand under each; the first that fits has it. Bindings use the same names.

No headline is the name of something, whose anchor it would take.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="page", help="only these (default: all)")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "api", metavar="DIR", help="default: docs/api")
    options = parser.parse_args()
    unknown = set(options.pages) - {page.name for page in PAGES}
    if unknown:
        parser.error(f"no such page: {', '.join(sorted(unknown))}; there are {', '.join(page.name for page in PAGES)}")
    options.to.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        if options.pages and page.name not in options.pages:
            continue
        path = options.to / f"{page.name}.md"
        if page.needs and importlib.util.find_spec(page.needs) is None:
            print(f"not written: {path}: {page.needs} is not installed here", file=sys.stderr)
            continue
        path.write_text(written(page))
        print(path)


def written(page: Page) -> str:
    """The whole page."""
    module = importlib.import_module(page.module)
    reference = Reference(module)
    lines = [f"# {page.title}", "", inline((module.__doc__ or "").split("\n\n")[0].split("::")[0].strip(), {}), ""]
    sections = list(reference.sections())
    lines += [f"- [{title}](#{anchor(title)}): " + ", ".join(f"[`{n}`](#{anchor(n)})" for n in names)
              for title, names in sections]  # fmt: skip
    lines += [f"- [{title}](#{anchor(title)})" for title in page.parts]
    for title, names in sections:
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### {name}", "", *reference.entry(name, getattr(module, name))]
    for title, paths in page.parts.items():
        named = [path.rpartition(".") for path in paths]
        kinds = [getattr(importlib.import_module(owner), name) for owner, _, name in named]
        lines += ["", f"## {title}", *reference.members("optimizer", *kinds)]
    return "\n".join(lines) + "\n"


class Reference:
    """Says about everything that a module exports what it is, but for names with an underscore, which only old scripts import.

    Args:
        module: with ``__all__``.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._public = [name for name in module.__all__ if not name.startswith("_")]
        self._links = {name: f"#{anchor(name)}" for name in self._public}
        # Defaults are shown by the names under which users know them.
        self._names: dict[int, str] = {}
        for name in self._public:
            value = getattr(module, name)
            self._names[id(value)] = name
            if inspect.isclass(value):
                self._names.update({id(part): f"{name}.{key}" for key, part in _public(value) if inspect.isclass(part)})

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        left = list(self._public)
        for title, pattern in SECTIONS:
            names = [name for name in left if re.fullmatch(pattern, name)]
            left = [name for name in left if name not in names]
            if names:
                yield title, names

    def entry(self, name: str, value: Any) -> list[str]:
        """What stands under the headline of an exported name."""
        if not callable(value):
            number = isinstance(value, int)  # so is what an IntEnum has
            return [f"`{name} = {int(value) if number else repr(value)}`"]
        lines = ["```python", *self.signature(name, value), "```", "", *self._prose(value)]
        if inspect.isclass(value):
            lines += self.members(name, value)
        return lines

    def members(self, owner: str, *kinds: type) -> list[str]:
        """The public methods, properties and choices of classes that this project wrote; the first class goes before."""
        found = {name: value for kind in reversed(kinds) for name, value in _public(kind)}
        lines: list[str] = []
        properties = [name for name, value in found.items() if isinstance(value, property)]
        if properties:
            lines += ["", "Attributes: " + ", ".join(f"`{owner}.{name}`" for name in properties) + "."]
        for name, value in found.items():
            if not value.__doc__ or isinstance(value, property):
                continue
            if inspect.isclass(value):
                lines += ["", f"- `{owner}.{name}`: {self._prose(value)[0]}"]
            elif callable(value):
                lines += ["", "```python", *self.signature(f"{owner}.{name}", value), "```", "", *self._prose(value)]
        return lines

    def _prose(self, value: Any) -> list[str]:
        return prose(inspect.cleandoc(value.__doc__ or ""), self._links)

    def signature(self, name: str, value: Any) -> list[str]:
        """One line, or one for each parameter where that would be too long."""
        try:
            given = inspect.signature(value)
        except ValueError:  # some exceptions have none
            return [name]
        if inspect.isclass(value) and value.__init__ is Exception.__init__:
            return [name]
        parameters = [p for p in given.parameters.values() if p.name != "self"]
        words = [self._parameter(p) for p in parameters]
        result = given.return_annotation
        arrow = "" if result is inspect.Signature.empty or inspect.isclass(value) else f" -> {_annotation(result)}"
        line = f"{name}({', '.join(words)}){arrow}"
        return [line] if len(line) <= 100 else [f"{name}(", *(f"    {word}," for word in words), f"){arrow}"]

    def _parameter(self, parameter: inspect.Parameter) -> str:
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
        word = stars.get(parameter.kind.name, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            word += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            word += f" = {self._names.get(id(parameter.default)) or repr(parameter.default)}"
        return word


def _public(kind: type) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(kind).items() if not name.startswith("_")]


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else str(inspect.formatannotation(annotation))
    return re.sub(r"\b_Optimizer\b", "torch.optim.Optimizer", text)


def anchor(headline: str) -> str:
    """What a headline is linked by."""
    return re.sub(r"[^\w\- ]", "", headline).strip().lower().replace(" ", "-")


SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Shape|Keywords|Note|Example):")
RULE = re.compile(r"=+( +=+)+")


def prose(docstring: str, links: dict[str, str]) -> list[str]:
    """Markdown of a docstring, with names in ``links`` linked."""
    lines: list[str] = []
    rest = docstring.splitlines()
    while rest:
        line = rest.pop(0)
        section = SECTION.fullmatch(line)
        if section:
            lines += [f"**{section[1]}**", "", *_items(_indented(rest), links, section[1]), ""]
        elif RULE.fullmatch(line):
            stop = next(number for number, text in enumerate(rest) if RULE.fullmatch(text))
            lines += [*_table(line, rest[:stop], links), ""]
            del rest[: stop + 1]
        elif line.endswith("::"):
            lines += [inline(line[:-1], links), "", "```python", *_indented(rest), "```", ""]
        else:
            lines.append(inline(line, links))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).rstrip()).split("\n")


def _indented(rest: list[str]) -> list[str]:
    """Take the indented lines, and empty ones between them, from the front of ``rest``."""
    stop = next((number for number, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
    taken, rest[:] = rest[:stop], rest[stop:]
    return inspect.cleandoc("\n".join(["", *taken])).splitlines()


def _items(lines: Sequence[str], links: dict[str, str], section: str) -> list[str]:
    """A list of ``name: text``, or what else stands in a section."""
    if section not in ("Args", "Attributes", "Raises", "Keywords"):
        return [inline(line, links) for line in lines]
    items: list[str] = []
    for line in lines:
        name, colon, text = line.partition(": ")
        if colon and not line.startswith(" "):
            items.append(f"- `{name}`: {inline(text, links)}")
        elif line.strip():
            items.append(f"  {inline(line.strip(), links)}" if items else inline(line, links))
    return items


def _table(rule: str, lines: Sequence[str], links: dict[str, str]) -> list[str]:
    """A simple table without a head; a line that starts with blanks goes on with the row before it."""
    starts = [match.start() for match in re.finditer(r"=+", rule)]
    rows: list[list[str]] = []
    for line in lines:
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells, strict=True)]
    head = ["|" + " |" * len(starts), "|" + "---|" * len(starts)]
    return head + ["| " + " | ".join(inline(cell, links).replace("|", "\\|") for cell in row) + " |" for row in rows]


TOKEN = re.compile(r"``(?P<literal>.+?)``|:\w+:`~?(?P<target>[\w.]+)`|(?P<special>[<*])")


def inline(text: str, links: dict[str, str]) -> str:
    """A line of prose: literals, references, and nothing that Markdown would take for markup."""

    def shown(match: re.Match[str]) -> str:
        if match["literal"]:
            return f"`{match['literal']}`"
        if match["special"]:
            return "\\" + match["special"]
        name = match["target"].rpartition(".")[2]
        return f"[`{name}`]({links[name]})" if name in links else f"`{match['target']}`"

    return TOKEN.sub(shown, text)


if __name__ == "__main__":
    main()
