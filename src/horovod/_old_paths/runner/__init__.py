"""``horovod.runner``: import paths of existing scripts."""
