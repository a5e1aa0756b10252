"""Completes the metadata of a wheel: the long description and the project's addresses. Hatchling calls it; see ``make wheel``.
``docs/conf.py`` takes the repository's address from here.

README.md links to files of the repository. A package index shows the text without them, so each such link becomes absolute, or
plain words where the repository's address is not known. ``REPOSITORY_URL`` in the environment says it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:`[^`]*`|[^\]`])*)\]\((?!\w+:)([^)\s]+)\)")


class RepositoryMetadata(MetadataHookInterface):
    """Sets the fields that ``pyproject.toml`` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        address = repository()
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, address)}
        metadata["urls"] = urls(address)


def repository() -> str:
    """The address of the repository's pages; "" if it is not known."""
    address = os.environ.get("REPOSITORY_URL", "").removesuffix(".git").rstrip("/")
    return address if address.startswith("https://") else ""


def description(text: str, address: str) -> str:
    """``text`` with links that lead somewhere outside the repository, too. Without an address only their words stay."""

    def absolute(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if not address:
            return "" if picture else words
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return LINK.sub(absolute, text)


def urls(address: str) -> dict[str, str]:
    if not address:
        return {}
    return {
        "Homepage": address,
        "Documentation": f"{address}/blob/HEAD/docs/index.md",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
