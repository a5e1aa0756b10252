"""How Sphinx makes the site of these pages: ``make docs``. Needs the extra ``docs`` alone, no framework, and no network.

``REPOSITORY_URL`` in the environment is the repository's address. With it, each page links to its source, and files outside of
``docs`` are links into the repository; without it they are downloads.
"""

from __future__ import annotations

import posixpath
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import generate
import hatch_build

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
repository = hatch_build.repository()
if repository:
    html_theme_options = {
        "source_view_link": f"{repository}/blob/HEAD/docs/{{filename}}",
        "footer_icons": [{"name": "Repository", "url": repository, "html": "Repository", "class": ""}],
    }
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
    app.add_config_value("repository", "", "env")  # pages are read again if it has changed
    app.connect("source-read", _for_the_site)
    app.connect("html-page-context", _without_source)


def _for_the_site(_app: Sphinx, page: str, source: list[str]) -> None:
    """Complete two pages, which are also read in the repository, where Sphinx's directives would be shown as they are."""
    if repository:
        source[0] = hatch_build.LINK.sub(partial(_into_repository, posixpath.dirname(page)), source[0])
    if page == "index":
        source[0] += _navigation(source[0])
    if page == "get-started":
        readme = (Path(__file__).parents[1] / "README.md").read_text()
        begin = readme[readme.index("## Install") : readme.index(" `make train` does the same")].replace(
            "](docs/", "]("
        )
        source[0] = source[0].replace("<!-- README: install, five lines -->", begin)


def _into_repository(folder: str, match: re.Match[str]) -> str:
    """A link of a page in ``folder``, as it is or, if it leads out of ``docs``, into the repository."""
    target = posixpath.normpath(posixpath.join("docs", folder, match[3]))
    inside = match[1] or match[3].startswith("#") or target.startswith("docs/")
    return match[0] if inside else f"[{match[2]}]({repository}/blob/HEAD/{target})"


def _without_source(_app: Sphinx, page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Offer no source of the reference, which is not in the repository."""
    if page.startswith("api/"):
        context["page_source_suffix"] = ""


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
