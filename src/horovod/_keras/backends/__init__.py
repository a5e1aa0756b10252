"""The backends of Keras 3: how each reduces gradients and single values."""
