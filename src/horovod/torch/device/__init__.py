"""Tensors on devices: copies to host memory and back."""
