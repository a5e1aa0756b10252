"""Collectives on TensorFlow tensors, one file each, with their gradients; checks of arguments and tensors."""
