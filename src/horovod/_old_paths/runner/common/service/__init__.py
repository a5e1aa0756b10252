"""``horovod.runner.common.service``: import paths of existing scripts."""
