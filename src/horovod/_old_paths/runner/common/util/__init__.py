"""``horovod.runner.common.util``: import paths of existing scripts."""
