"""``horovod.data``: base classes of data loaders, in :mod:`horovod.data.data_loader_base`."""
