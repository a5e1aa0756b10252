"""What the TensorFlow and Keras bindings do with a Keras model: read and write its variables, evaluate it, keep its state.

These modules work with Keras 3 on any backend and with Keras 2. They import neither Keras nor a framework.
"""
