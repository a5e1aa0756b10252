"""Slurm's short forms for lists of nodes and of ports. Pure: ``scontrol show hostnames`` is not needed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

MOST_NODES = 1 << 16
"""The maximum length of a list: a longer one is not Slurm's, and would fill the memory."""

_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(text: str) -> list[str]:
    """The nodes of a list in Slurm's form, in its order: ``"n[08-10,12],login"`` is n08, n09, n10, n12 and login.

    Numbers keep their leading zeros. A name may have several brackets; the last one varies fastest.

    Raises:
        ValueError: the text has another form; the message quotes the part that is wrong.
    """
    nodes: list[str] = []
    for name in _split(text):
        pieces = _PART.split(name)  # literal text at even indices, contents of brackets at odd ones
        if not name or any(character in piece for piece in pieces[::2] for character in "[] \t"):
            raise ValueError(f"{name!r} is not of the form node7 or node[01-03,07]")
        choices = [list(_expand_ranges(piece, name)) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        number = 1
        for choice in choices:
            number *= len(choice)
        if len(nodes) + number > MOST_NODES:
            raise ValueError(f"{name!r} names more than {MOST_NODES} nodes")
        nodes += map("".join, itertools.product(*choices))
    return nodes


def expand_ports(text: str) -> list[int]:
    """The ports of ``"12000-12003,12010"``.

    Raises:
        ValueError: the text has another form, or a number is no port.
    """
    ports = [int(number) for number in _expand_ranges(text, text)]
    wrong = [port for port in ports if not 0 < port < 65536]
    if wrong:
        raise ValueError(f"{wrong[0]} is not the number of a port")
    return ports


def _split(text: str) -> Iterator[str]:
    """The names, which are separated by the commas outside of brackets."""
    depth = start = 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


def _expand_ranges(text: str, whole: str) -> Iterator[str]:
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{whole!r}: {part!r} is not of the form 7 or 01-03")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{whole!r}: {part!r} counts down")
        if last - first >= MOST_NODES:
            raise ValueError(f"{whole!r}: {part!r} has more than {MOST_NODES} numbers")
        width = len(match[1])
        yield from (f"{number:0{width}d}" for number in range(first, last + 1))
