"""CUDA's streams, events and memory, for frameworks that expose none of their own in Python."""
