"""How Sphinx makes the site of these pages: ``make docs``. Needs the extra ``docs`` alone, no framework, and no network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import generate

from horovod import _version

generate.write(Path(__file__).parent / "api")

project = "Horovod"
author = "the Horovod developers"
release = _version.VERSION
version = _version.INTERFACE
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
