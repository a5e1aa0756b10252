"""The engine over MPI, through mpi4py."""
