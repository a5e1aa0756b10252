"""How a collective runs inside a TensorFlow graph."""
