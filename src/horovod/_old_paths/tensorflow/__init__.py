"""``horovod.tensorflow``: import paths of existing scripts."""
