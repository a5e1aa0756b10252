"""The loops that are wrong at present, by what each waits for. The test of such a loop fails when the loop becomes right."""

from __future__ import annotations

WAITING: dict[str, str] = {}
