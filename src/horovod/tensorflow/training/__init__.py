"""Reduction of gradients for tapes and optimizers of TensorFlow, and TensorFlow 1's Adasum optimizer."""
