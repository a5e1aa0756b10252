"""Keras 2 (``tf_keras``): its distributed optimizer, and checks whether objects and files are of Keras 2."""
