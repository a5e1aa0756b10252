"""How long the processes of a job have to end by themselves: the time between SIGTERM and SIGKILL.

The guardian imports this in a bare interpreter.
"""

GRACE_SECONDS = 3.0
