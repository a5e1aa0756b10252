"""``horovod.runner.http``: import paths of existing scripts."""
