"""The ranks' messages about collectives, and the decisions that follow from them. Pure: no I/O, no locks, no clock."""
