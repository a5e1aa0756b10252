"""Collectives on PyTorch tensors, one file each, with their gradients; handles, and checks of arguments and tensors."""
