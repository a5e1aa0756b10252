"""What ``horovod.keras`` and ``horovod.tensorflow.keras`` share: the distributed optimizer, its callbacks, loading models.

There are separate files for Keras 3 on its backends (TensorFlow, PyTorch, JAX) and for Keras 2 (``tf_keras``). No module here
imports Keras or a framework that the script does not use already. The two packages say which version of Keras is used. The
classes of distributed optimizers have this package as their ``__module__``. Scripts recognise them by it.
"""
