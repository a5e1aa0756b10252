"""The part of elastic training inside a rank: states, the retry loop, and the interface to an elastic launcher.

Independent of any framework. Bindings derive their states from :mod:`horovod.elastic.state` and make their ``run`` of
:func:`horovod.elastic.loop.run_fn`. ``horovod.common.elastic`` is the import path that scripts use.
"""
