"""The memory of a collective's tensors: host memory, device memory that an engine moves, and staged copies of device memory."""
