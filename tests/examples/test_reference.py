"""The reference that ``make docs`` writes: everything that is public stands in it, and reads well."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
import pytest
from markdown_it import MarkdownIt

from horovod.runner.arguments import build_parser

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "generate.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


generate = load()


@pytest.fixture(scope="module")
def package() -> Any:
    return generate.source()


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda page: page.name)
def test_a_page_tells_about_everything_that_is_public(page: Any, package: Any) -> None:
    tokens = MarkdownIt().enable("table").parse(generate.written(page, package))
    headlines = [tokens[number + 1].content for number, token in enumerate(tokens) if token.type == "heading_open"]
    anchors = [generate.anchor(headline) for headline in headlines]
    assert len(anchors) == len(set(anchors)), "two headlines with the same anchor"
    spoken = [child for token in tokens for child in token.children or [] if token.type == "inline"]
    for child in spoken:
        if child.type == "link_open":
            assert child.attrs["href"].removeprefix("#") in anchors
        if child.type == "text":
            assert not re.search(r"``|:\w+:`|::$", child.content), f"left from the docstring: {child.content}"
    assert [token.info for token in tokens if token.type == "fence"] == ["python"] * sum(
        token.type == "fence" for token in tokens
    )
    signatures = "\n".join(token.content for token in tokens if token.type == "fence")
    assert not re.search(r" at 0x|<class |ReduceOp\.", signatures), "a default that users would not write"


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda page: page.name)
def test_a_page_has_what_the_module_exports(page: Any, package: Any) -> None:
    """What is parsed is what is imported: names, docstrings, and the names of parameters."""
    if page.name == "mxnet":
        pytest.importorskip("mxnet")
    module = importlib.import_module(page.module)
    public = [name for name in module.__all__ if not name.startswith("_")]
    reference = generate.Reference(generate.named(package, page.module))
    assert sorted(reference.public) == sorted(public)
    for name in public:
        value, parsed = getattr(module, name), generate.resolved(generate.named(package, page.module).members[name])
        if not callable(value) or isinstance(parsed, griffe.Attribute):
            continue
        assert value.__doc__, f"no docstring: {name}"
        assert any(reference.entry(name, parsed)[3:]), f"not said: {name}"
        if inspect.isfunction(value):
            shown = " ".join(reference.signature(name, parsed))
            assert all(re.search(rf"[ (*]{each}\b", shown) for each in inspect.signature(value).parameters), name


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda page: page.name)
def test_a_page_has_what_the_modules_of_a_binding_export_with_signatures(page: Any, package: Any) -> None:
    text = generate.written(page, package)
    binding = generate.named(package, page.module)
    for name in generate.Reference(binding).public:
        module = generate.resolved(binding.members[name])
        if not isinstance(module, griffe.Module):
            continue
        inner = generate.Reference(module)
        assert inner.public
        for each in inner.public:
            entry = text.split(f"#### {name}.{each}\n")[1].split("\n#")[0]
            shown, said = re.split(r"\n```\n|`\n", entry, maxsplit=1)
            assert f"{name}.{each}" in shown, each
            assert said.strip(), f"not said: {name}.{each}"
            if isinstance(generate.resolved(module.members[each]), griffe.Class):
                assert re.search(rf"{each}\(", shown), f"without a signature: {name}.{each}"


def test_the_page_of_flags_has_every_flag_that_help_shows_once() -> None:
    text = generate.flags()
    shown = {
        name
        for action in build_parser(brief=False)._actions
        if action.help != argparse.SUPPRESS
        for name in action.option_strings
    }
    cells = [
        [child for child in token.children or [] if child.type == "code_inline"]
        for token in MarkdownIt().enable("table").parse(text)
        if token.type == "inline" and token.content.startswith("`-")
    ]
    spelt = [child.content.split(" ")[0] for cell in cells for child in cell]
    assert sorted(spelt) == sorted(shown) and len(shown) > 60
    for variable in ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE"):
        assert variable in text


def test_the_site_is_built_without_a_warning_and_links_to_the_repository(tmp_path: Path) -> None:
    docs = SCRIPT.parent
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-W",
            "--keep-going",
            "-q",
            "-b",
            "html",
            "-d",
            tmp_path / "trees",
            docs,
            tmp_path / "html",
        ],
        env=os.environ | {"REPOSITORY_URL": "https://example.org/me/horovod.git"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(docs).with_suffix("") for path in docs.rglob("*.md")}
    assert pages == {path.relative_to(tmp_path / "html").with_suffix("") for path in (tmp_path / "html").rglob("*.html")} - {
        Path("genindex"), Path("search")
    }  # fmt: skip
    text = (tmp_path / "html" / "api" / "torch.html").read_text()
    assert "DistributedOptimizer" in text
    links = {
        name: re.findall(
            r'href="https://example.org/me/horovod/blob/HEAD/([^"]+)"', (tmp_path / "html" / name).read_text()
        )
        for name in ("elastic.html", "design/launcher.html", "api/torch.html")
    }
    assert {"docs/elastic.md", "examples/pytorch_mnist_elastic.py"} <= set(links["elastic.html"])
    assert "docs/design/launcher.md" in links["design/launcher.html"] and not links["api/torch.html"]
    assert "http://" not in re.sub(r'href="http://[^"]*"|xmlns="[^"]*"', "", text), (
        "something is fetched from elsewhere"
    )


DOCSTRING = """Reduce ``tensor`` over * ranks, *once*, with *args and **kwargs; see :func:`there` and :class:`~a.b.Elsewhere`.

===  ======
one  first,
     still
two  second
===  ======

For example::

    first()

    second()

Args:
    tensor: of any shape,
        or none.
    name, label: <unused>

Returns:
    The sum.
"""

MARKDOWN = """Reduce `tensor` over \\* ranks, *once*, with \\*args and \\*\\*kwargs; see [`there`](#there) and `a.b.Elsewhere`.

| | |
|---|---|
| one | first, still |
| two | second |

For example:

```python
first()

second()
```

**Args**

- `tensor`: of any shape,
  or none.
- `name, label`: \\<unused>

**Returns**

The sum."""


def test_a_docstring_becomes_markdown() -> None:
    assert "\n".join(generate.prose(DOCSTRING, {"there": "#there"})) == MARKDOWN


def test_the_command_writes_the_pages_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", "run", "--to", str(tmp_path)])
    generate.main()
    assert [path.name for path in tmp_path.iterdir()] == ["run.md"]
    assert (tmp_path / "run.md").read_text().startswith("# `horovod`")
    monkeypatch.setattr(sys, "argv", ["generate.py", "nonsense"])
    with pytest.raises(SystemExit, match="2"):
        generate.main()
    assert "no such page: nonsense" in capsys.readouterr().err
