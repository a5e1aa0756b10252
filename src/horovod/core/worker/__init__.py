"""The worker of a process set on one rank: it agrees with other ranks, as coordinator or member, and runs collectives."""
