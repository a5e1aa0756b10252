"""Shared by launchers and the jobs beside them, under the import paths that existing scripts use."""
