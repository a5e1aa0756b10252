"""Which engine serves which tensors: the choice that all ranks make together, and the communicators that result."""
