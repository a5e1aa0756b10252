"""What launchers and the jobs beside them share, under the import paths that existing scripts use."""
