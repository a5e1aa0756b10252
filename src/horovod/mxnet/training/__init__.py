"""Optimizer, Gluon trainer and their reduction of gradients."""
