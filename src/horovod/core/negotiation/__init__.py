"""What ranks tell each other about collectives, and what they conclude from it. Pure: no I/O, no locks, no clock."""
