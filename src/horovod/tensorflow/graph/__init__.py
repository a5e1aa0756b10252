"""How a collective becomes part of a TensorFlow graph: its name, its operations, and the wait for its completion."""
