"""How Sphinx makes the site of these pages: ``make docs``. Needs the extra ``docs`` alone, no framework, and no network."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import generate

from horovod._base.version import INTERFACE, VERSION

generate.write(Path(__file__).parent / "api")

project = "Horovod"
author = "the Horovod developers"
release = VERSION
version = INTERFACE
html_title = f"Horovod {release}"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
smartquotes = False  # which makes one dash of the two of a flag
html_show_copyright = False
html_copy_source = False
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["images", "_build", "_static"]
nitpicky = True

REFERENCE = [generate.COMMAND, *(page.name for page in generate.PAGES)]
"""Pages that exist only in the site."""


def setup(app: Sphinx) -> None:
    app.connect("source-read", _for_the_site)


def _for_the_site(_app: Sphinx, page: str, source: list[str]) -> None:
    """Complete two pages, which are also read in the repository, where Sphinx's directives would be shown as they are."""
    if page == "index":
        source[0] += _navigation(source[0])
    if page == "get-started":
        readme = (Path(__file__).parents[1] / "README.md").read_text()
        begin = readme[readme.index("## Install") : readme.index(" `make train` does the same")].replace(
            "](docs/", "]("
        )
        source[0] = source[0].replace("<!-- README: install, five lines -->", begin)


def _navigation(index: str) -> str:
    """The site's navigation, from the lists of links in ``index.md``."""
    trees = []
    for section in index.split("\n## ")[1:]:
        caption = section.splitlines()[0]
        pages = re.findall(r"^- \[[^\]]+\]\(([\w/-]+)\.md\)", section, re.MULTILINE)
        pages += [f"api/{name}" for name in REFERENCE] if caption == "Reference" else []
        trees.append(
            f"\n```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
        )
    return "".join(trees)
