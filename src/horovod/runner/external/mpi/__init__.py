"""Jobs whose ranks are started by an MPI's ``mpirun``: ``horovodrun --mpi`` and ``horovod.run(use_mpi=True)``."""
