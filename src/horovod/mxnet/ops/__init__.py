"""Collectives on MXNet arrays, one file each; the bridge to MXNet's engine; checks of arguments and arrays."""
