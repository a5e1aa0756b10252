"""Shared by all bindings: checks of arguments, buckets, reductions, objects, data sets."""
