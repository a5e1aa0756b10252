"""The worker thread of a process set: it agrees with other ranks and runs collectives."""
