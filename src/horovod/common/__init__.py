"""The import paths that existing scripts use for what all bindings share. Re-exports; what is decided here is only names."""
