"""Collectives on NDArrays."""
