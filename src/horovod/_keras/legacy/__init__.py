"""Keras 2."""
