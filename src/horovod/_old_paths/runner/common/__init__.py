"""``horovod.runner.common``: import paths of existing scripts."""
