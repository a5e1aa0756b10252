"""What every package may import, and what imports none of them: settings, the identity of a process, the version, and small
tools of one process.

Nothing here knows what a rank, a collective or a job does.
"""
