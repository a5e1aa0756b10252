"""Where ranks may run: what the user, a file, a script or a batch system says, and which rank gets which slot."""
