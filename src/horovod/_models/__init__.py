"""Shared by the bindings of TensorFlow and Keras: read and write a model's variables, evaluate it, keep its state.

These modules work with Keras 3 on any backend and with Keras 2.
They import neither Keras nor a framework.
"""
