"""Import paths that only existing scripts use. Nothing of the project imports them.

A package lists its folder here in its ``__path__``: ``runner/gloo_run.py`` is imported as ``horovod.runner.gloo_run``.
"""
