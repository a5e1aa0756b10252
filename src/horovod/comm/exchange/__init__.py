"""Communicators over a transport that moves bytes between any two ranks."""
