"""``horovod.runner.http``: an import path that scripts use."""
