"""Jobs whose ranks an MPI's ``mpirun`` starts: ``horovodrun --mpi`` and ``horovod.run(use_mpi=True)``."""
