"""What ``horovod.keras`` and ``horovod.tensorflow.keras`` share: the distributed optimizer, its callbacks, loading models.

One file each: for Keras 3 on its backends (TensorFlow, PyTorch, JAX), and for Keras 2 (``tf_keras``). Nothing here imports
Keras or a framework unless it is in use already; the two packages say which Keras it is. Classes that wrap an optimizer's
class have this package as their ``__module__``, which is how scripts recognise them.
"""
