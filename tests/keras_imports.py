"""What the template of ranks with Keras imports (see ``rank_template``): the binding, and what Keras itself imports later.

Keras imports TensorFlow on every backend when it first seeds random numbers. That costs seconds, which each rank would spend.
"""

import horovod.keras

# isort: split
import tensorflow  # after the backend, as Keras does

__all__ = ["horovod", "tensorflow"]
