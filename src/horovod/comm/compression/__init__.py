"""Compressed reductions: floating-point numbers as small integers, block by block."""
