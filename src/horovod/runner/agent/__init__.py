"""What runs a job's processes on one host: inside the launcher on its own host, as a program of its own on every other.

Imports of this package stay light: the guardian's bare interpreter passes here.
"""
