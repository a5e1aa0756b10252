"""What differs between TensorFlow, PyTorch and JAX under Keras 3."""
