"""Writes the reference of the public interface, ``docs/api/<page>.md``, from signatures and docstrings: ``make docs``.

A binding gets its page by a line in ``PAGES``. The pages are built and not kept in git: they would be a second copy of every
docstring, stale after each change of one, while whoever has the source has the command. A test builds them all.

The source is parsed by griffe and never imported, so no framework is needed. Docstrings are read as this project writes them:
prose with ``literals`` and :role:`names`, sections such as ``Args:``, simple tables, and indented code after ``::``.

The page of ``horovodrun`` comes from the launcher's own parser, which imports no framework either.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import griffe

from horovod.runner.arguments import build_parser

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Page:
    """One page of the reference.

    Attributes:
        name: of the file, without ``.md``.
        module: whose ``__all__`` it tells about.
        title: its headline.
        parts: by a headline, classes that users get to see but never name, whose public methods stand under it.
    """

    name: str
    module: str
    title: str
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)


PAGES = (
    Page("run", "horovod", "`horovod`: starting a job from Python"),
    Page(
        "torch",
        "horovod.torch",
        "`horovod.torch`: Horovod for PyTorch",
        parts={
            "What a distributed optimizer has": (
                "horovod.torch.optimizer.gradient_optimizer.GradientOptimizer",
                "horovod.torch.optimizer.wrapped.WrappedOptimizer",
            ),
            "What a local optimizer has besides": ("horovod.torch.optimizer.local_reduction.LocalGradientOptimizer",),
        },
    ),
    Page("tensorflow", "horovod.tensorflow", "`horovod.tensorflow`: Horovod for TensorFlow"),
    Page("keras", "horovod.keras", "`horovod.keras`: Horovod for Keras 3"),
    Page(
        "tensorflow-keras",
        "horovod.tensorflow.keras",
        "`horovod.tensorflow.keras`: Horovod for tf.keras",
    ),
    Page("mxnet", "horovod.mxnet", "`horovod.mxnet`: Horovod for MXNet"),
)

COMMAND = "horovodrun"
"""The page of the launcher's flags."""

SECTIONS = (
    ("Starting and ending", r"run|init|shutdown|is_initialized"),
    ("Who is who", r"((local|cross)_)?(rank|size)(_op)?|is_homogeneous"),
    (
        "Training",
        r"(Partial)?Distributed\w+|broadcast_(parameters|optimizer_state|variables|global_variables)|SyncBatch\w+"
        r"|reduce_gradients|load_model",
    ),
    ("Making gradients smaller", r"\w*Compress(ion|or)"),
    ("Reducing", r"\w*allreduce\w*"),
    ("Kinds of reduction", r"Average|Sum|Adasum|Min|Max|Product"),
    ("Gathering", r"(grouped_)?allgather(_async)?"),
    ("Broadcasting", r"broadcast(_async)?_?"),
    ("Exchanging rows", r"alltoall\w*"),
    ("Reducing and scattering", r"\w*reducescatter\w*"),
    ("Python objects", r"\w+_object\w*"),
    ("Waiting for results", r"poll|synchronize"),
    ("Waiting for ranks", r"join|barrier"),
    ("Process sets", r"\w*process_set\w*|ProcessSet"),
    ("The timeline", r"\w+_timeline"),
    ("Errors", r"\w+(Error|Interrupt)"),
    (
        "What this installation can do",
        r"\w+_(built|enabled|supported|available)|check_extension|build_info|__version__",
    ),
    ("Modules", r"callbacks|data|elastic"),
    ("More", r".*"),
)
"""Headlines, and the names that stand under each; the first that fits has it. Bindings use the same names.

No headline is the name of something, whose anchor it would take.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="page", help="only these (default: all)")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "api", metavar="DIR", help="default: docs/api")
    options = parser.parse_args()
    known = [page.name for page in PAGES] + [COMMAND]
    unknown = set(options.pages) - set(known)
    if unknown:
        parser.error(f"no such page: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for path in write(options.to, options.pages):
        print(path)


def write(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Write pages, all if none is named, and leave those alone that would not change. Returns their paths."""
    package = source()
    folder.mkdir(parents=True, exist_ok=True)
    texts = {page.name: written(page, package) for page in PAGES if not names or page.name in names}
    if not names or COMMAND in names:
        texts[COMMAND] = flags()
    paths = []
    for name, text in texts.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        paths.append(path)
    return paths


def source() -> griffe.Module:
    """The package, parsed."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    package = loader.load("horovod")
    loader.resolve_aliases(external=False)
    assert isinstance(package, griffe.Module)
    return package


def written(page: Page, package: griffe.Module) -> str:
    """The whole page."""
    module = named(package, page.module)
    reference = Reference(module)
    lines = [f"# {page.title}", ""]
    first = _docstring(module).split("\n\n")[0].split("::")[0].strip()
    if first.rstrip(".") not in page.title:
        lines += [inline(first, {}), ""]
    sections = list(reference.sections())
    lines += [f"- [{title}](#{anchor(title)}): " + ", ".join(f"[`{n}`](#{anchor(n)})" for n in names)
              for title, names in sections]  # fmt: skip
    lines += [f"- [{title}](#{anchor(title)})" for title in page.parts]
    for title, names in sections:
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### {name}", "", *reference.entry(name, resolved(module.members[name]))]
    for title, paths in page.parts.items():
        lines += ["", f"## {title}", *reference.members("optimizer", *(named(package, path) for path in paths))]
    return "\n".join(lines) + "\n"


NAME = re.compile(
    r"(?<![\w-])(?:--mpi-args=\"[^\"]*\"|--?[a-z][\w-]*|[A-Z]+(?:_[A-Z]+)+(?:=\d)?|DIR/\S+|name slots=n|h1:2,h2:4|\w+:slots"
    r"|localhost:N|HOST:PORT|unix:PATH)"
)
"""What is code in the help of a flag: other flags, variables, and the forms of values."""


def flags() -> str:
    """The page of ``horovodrun``: every flag, in the groups of ``--help-all``."""
    parser = build_parser(brief=False)
    lines = [f"# `{COMMAND}`: flags", "", f"    {parser.usage}", "", str(parser.description)]
    lines += ["", "A flag that sets a variable names it, and takes precedence over it."]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help not in (None, argparse.SUPPRESS)]
        if not actions:
            continue
        lines += ["", f"## {(group.title or '').capitalize()}"]
        lines += ["", f"{_words(group.description[:1].upper() + group.description[1:])}."] if group.description else []
        lines += ["", "| flag | meaning |", "|---|---|"]
        for action in actions:
            values = action.metavar or "|".join(map(str, action.choices or ()))
            value = " ".join(values) if isinstance(values, tuple) else values
            names = [
                f"`{name} {value}`" if value and action.nargs != 0 else f"`{name}`" for name in action.option_strings
            ]
            cells = (", ".join(names), _words(action.help or ""))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Examples", "", *(f"    {line.strip()}" for line in (parser.epilog or "").splitlines()[1:])]
    return "\n".join(lines) + "\n"


def _words(text: str) -> str:
    """Markdown of a flag's help."""
    return NAME.sub(r"`\g<0>`", text.replace("%%", "%").replace("`", ""))


def named(package: griffe.Module, path: str) -> griffe.Object:
    """What has a dotted name."""
    return package if path == package.path else resolved(package[path.removeprefix(f"{package.path}.")])


def resolved(found: griffe.Object | griffe.Alias) -> griffe.Object:
    """What a name stands for: what is imported under it, or what a module gives another name (``New = Old``)."""
    target = found.final_target if isinstance(found, griffe.Alias) else found
    if isinstance(target, griffe.Attribute) and isinstance(target.value, griffe.ExprName):
        try:
            other = target.modules_collection[target.resolve(target.value.name)]
        except (griffe.NameResolutionError, griffe.AliasResolutionError, KeyError):
            return target
        other = other.final_target if isinstance(other, griffe.Alias) else other
        if isinstance(other, (griffe.Class, griffe.Function)):
            return other
    assert isinstance(target, griffe.Object)
    return target


def _docstring(found: griffe.Object) -> str:
    """The text of a docstring; "" without one.

    One that begins ``As :func:`other`.`` has the other function's text first; the decorator ``documented_as`` has it alone.
    """
    copied = found.members.get("__doc__") if isinstance(found, griffe.Class) else None
    if isinstance(copied, griffe.Attribute) and isinstance(
        copied.value, griffe.ExprAttribute
    ):  # __doc__ = Other.__doc__
        return _docstring(resolved(found.modules_collection[copied.value.canonical_path.removesuffix(".__doc__")]))
    if found.docstring:
        text = found.docstring.value
        same = SAME.match(text)
        if same is None:
            return text
        other = found.modules_collection[same[1]]  # what is said there comes first
        return f"{_docstring(resolved(other))}\n\n{text[same.end() :].strip()}".strip()
    for decorator in found.decorators if isinstance(found, griffe.Function) else ():
        call = decorator.value
        if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".documented_as"):
            other = call.arguments[0]
            assert isinstance(other, griffe.ExprAttribute | griffe.ExprName)
            return _docstring(resolved(found.modules_collection[other.canonical_path]))
    return ""


class Reference:
    """Says about everything that a module exports what it is, but for names with an underscore, which only old scripts import.

    Args:
        module: with ``__all__``.
        prefix: what users write before each name: ``elastic.`` for a module of a binding.
    """

    def __init__(self, module: griffe.Object, prefix: str = "") -> None:
        self.public = [str(name) for name in module.exports or [] if not str(name).startswith("_")]
        self._links = {name: f"#{anchor(prefix + name)}" for name in self.public}
        # Defaults are shown by the names under which users know them.
        self._names = {
            str(target.value): name
            for name, target in ((name, resolved(module.members[name])) for name in self.public)
            if isinstance(target, griffe.Attribute) and isinstance(target.value, griffe.ExprAttribute)
        }

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        left = list(self.public)
        for title, pattern in SECTIONS:
            names = [name for name in left if re.fullmatch(pattern, name)]
            left = [name for name in left if name not in names]
            if names:
                yield title, names

    def entry(self, name: str, value: griffe.Object) -> list[str]:
        """What stands under the headline of an exported name."""
        if isinstance(value, griffe.Module):
            return [f"`{value.path}`", "", *self._prose(value), *self._contents(f"{name}.", value)]
        if isinstance(value, griffe.Attribute):
            prose = self._prose(value)
            shown = name if isinstance(value.value, griffe.ExprCall) else f"{name} = {_number(value)}"
            return [f"`{shown}`", *(["", *prose] if any(prose) else [])]
        lines = ["```python", *self.signature(name, value), "```", "", *self._prose(value)]
        if isinstance(value, griffe.Class):
            lines += self.members(name, value)
        return lines

    @staticmethod
    def _contents(prefix: str, module: griffe.Module) -> list[str]:
        """Everything that a module of a binding exports, under headlines of the lowest level."""
        reference = Reference(module, prefix)
        lines: list[str] = []
        for name in reference.public:
            lines += ["", f"#### {prefix}{name}", "", *reference.entry(prefix + name, resolved(module.members[name]))]
        return lines

    def members(self, owner: str, *kinds: griffe.Object) -> list[str]:
        """The public methods, properties and choices of classes that this project wrote; the first class goes before."""
        found = {name: value for kind in reversed(kinds) for name, value in _public(kind)}
        lines: list[str] = []
        properties = [name for name, value in found.items() if "property" in value.labels]
        if properties:
            lines += ["", "Attributes: " + ", ".join(f"`{owner}.{name}`" for name in properties) + "."]
        for name, value in found.items():
            if not value.docstring or name in properties:
                continue
            if isinstance(value, griffe.Class):
                lines += ["", f"- `{owner}.{name}`: {self._prose(value)[0]}"]
            elif isinstance(value, griffe.Function):
                lines += ["", "```python", *self.signature(f"{owner}.{name}", value), "```", "", *self._prose(value)]
        return lines

    def _prose(self, value: griffe.Object) -> list[str]:
        return prose(_docstring(value), self._links)

    def signature(self, name: str, value: griffe.Object) -> list[str]:
        """One line, or one for each parameter where that would be too long."""
        function = value
        if isinstance(value, griffe.Class):
            made = value.all_members.get("__init__")
            function = value if made is None else resolved(made)
        if isinstance(value, griffe.Class) and any("NamedTuple" in str(base) for base in value.bases):
            words = [
                f"{field}: {each.annotation}" for field, each in _public(value) if isinstance(each, griffe.Attribute)
            ]
        elif isinstance(function, griffe.Function):
            words = list(self._parameters(function))
        else:
            return [name]
        returns = value.returns if isinstance(value, griffe.Function) else None
        arrow = "" if returns is None else f" -> {_annotation(returns)}"
        line = f"{name}({', '.join(words)}){arrow}"
        return [line] if len(line) <= 100 else [f"{name}(", *(f"    {word}," for word in words), f"){arrow}"]

    def _parameters(self, function: griffe.Function) -> Iterator[str]:
        """The parameters of a function as they stand in its definition, without self."""
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
        starred = False
        for parameter in function.parameters:
            kind = parameter.kind
            if parameter.name in ("self", "cls") or kind is None:
                continue
            if kind is griffe.ParameterKind.keyword_only and not starred:
                starred = True
                yield "*"
            starred = starred or kind is griffe.ParameterKind.var_positional
            word = stars.get(kind, "") + parameter.name
            if parameter.annotation is not None:
                word += f": {_annotation(parameter.annotation)}"
            if parameter.default is not None and kind not in stars:
                word += f" = {self._names.get(str(parameter.default), parameter.default)}"
            yield word


def _public(kind: griffe.Object) -> list[tuple[str, griffe.Object]]:
    return [(name, resolved(value)) for name, value in kind.members.items() if not name.startswith("_")]


def _number(constant: griffe.Attribute) -> str:
    """The value of a constant; of a member of an enumeration its number."""
    if isinstance(constant.value, griffe.ExprAttribute):
        member = constant.modules_collection.get_member(constant.value.canonical_path)
        if isinstance(member, griffe.Attribute):
            return str(member.value)
    return str(constant.value)


def _annotation(annotation: str | griffe.Expr) -> str:
    return re.sub(r"\b_Optimizer\b", "torch.optim.Optimizer", str(annotation))


def anchor(headline: str) -> str:
    """What a headline is linked by."""
    return re.sub(r"[^\w\- ]", "", headline).strip().lower().replace(" ", "-")


SAME = re.compile(r"As :func:`([\w.]+)`\.")
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
            # Where everything after the first line is code, all of it has lost its indentation.
            code = _indented(rest) if lines or any(text.startswith(" ") for text in rest[:2]) else _all(rest)
            lines += [inline(line[:-1], links), "", "```python", *code, "```", ""]
        else:
            lines.append(inline(line, links))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).rstrip()).split("\n")


def _indented(rest: list[str]) -> list[str]:
    """Take the indented lines, and empty ones between them, from the front of ``rest``."""
    stop = next((number for number, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
    taken, rest[:] = rest[:stop], rest[stop:]
    return inspect.cleandoc("\n".join(["", *taken])).splitlines()


def _all(rest: list[str]) -> list[str]:
    """Take everything."""
    taken, rest[:] = rest[:], []
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


TOKEN = re.compile(
    r"``(?P<literal>.+?)``|:\w+:`~?(?P<target>[\w.]+)`"
    r"|(?P<emphasis>(?P<stars>\*{1,2})\w([^*]*\w)?(?P=stars)(?!\w))|(?P<special>[<*])"
)


def inline(text: str, links: dict[str, str]) -> str:
    """A line of prose: literals, references, and nothing that Markdown would take for markup."""

    def shown(match: re.Match[str]) -> str:
        if match["literal"]:
            return f"`{match['literal']}`"
        if match["emphasis"]:
            return match["emphasis"]
        if match["special"]:
            return "\\" + match["special"]
        name = match["target"].rpartition(".")[2]
        return f"[`{name}`]({links[name]})" if name in links else f"`{match['target']}`"

    return TOKEN.sub(shown, text)


if __name__ == "__main__":
    main()
