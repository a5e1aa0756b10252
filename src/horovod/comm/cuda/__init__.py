"""CUDA's streams, events and memory, for frameworks that show none of their own in Python."""
