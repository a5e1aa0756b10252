"""The reference that ``make docs`` writes: everything that is public stands in it, and reads well."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from markdown_it import MarkdownIt

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "generate.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


generate = load()


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda page: page.name)
def test_a_page_tells_about_everything_that_is_public(page: Any) -> None:
    if page.needs:
        pytest.importorskip(page.needs)
    module = importlib.import_module(page.module)
    tokens = MarkdownIt().enable("table").parse(generate.written(page))
    headlines = [tokens[number + 1].content for number, token in enumerate(tokens) if token.type == "heading_open"]
    public = [name for name in module.__all__ if not name.startswith("_")]
    assert set(public) <= set(headlines)
    silent = [name for name in public if callable(getattr(module, name)) and not getattr(module, name).__doc__]
    assert not silent, f"no docstring: {silent}"
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


DOCSTRING = """Reduce ``tensor`` over * ranks; see :func:`there` and :class:`~a.b.Elsewhere`.

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

MARKDOWN = """Reduce `tensor` over \\* ranks; see [`there`](#there) and `a.b.Elsewhere`.

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
