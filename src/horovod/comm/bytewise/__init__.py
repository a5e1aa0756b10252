"""Communicators over a library of collectives on bytes."""
