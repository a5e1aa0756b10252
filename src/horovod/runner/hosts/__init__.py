"""The hosts that ranks may run on, from the user, a file, a script or a batch system, and the slot of each rank."""
