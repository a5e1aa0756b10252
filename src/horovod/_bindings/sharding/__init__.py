"""Divides a data set among the ranks: arrays, and data sets of TensorFlow."""
