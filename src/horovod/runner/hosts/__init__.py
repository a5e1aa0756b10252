"""The hosts on which ranks may run, from the user, a file, a script or a batch system; and the slot of each rank."""
