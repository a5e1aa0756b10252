"""Jobs whose ranks another program starts: ``jsrun``, or the ``mpirun`` of an MPI."""
