"""Shared by all bindings: checks of arguments, buckets, objects, data sets; and import paths that existing scripts use."""
