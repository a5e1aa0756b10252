"""Runs a job's processes on one host: inside the launcher on the launcher's host, as a program on every other host.

Importing this package must stay cheap: the guardian's bare interpreter imports it.
"""
