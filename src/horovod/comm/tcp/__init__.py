"""The engine between hosts: TCP connections."""
