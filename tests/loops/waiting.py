"""The loops that are wrong at present, by what each waits for. The test of such a loop fails when the loop becomes right."""

from __future__ import annotations

WAITING: dict[str, str] = {}
"""By the name of the loop, with the backend behind it if it is wrong only there."""
