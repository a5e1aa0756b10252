"""Collectives on tensors, with their gradients."""
