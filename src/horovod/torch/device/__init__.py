"""Host memory that stands for device memory in a collective: copies, their streams, and the pool of page-locked buffers."""
