"""Keras 2 (``tf_keras``): its distributed optimizer, and how objects and files of Keras 2 are recognised."""
