"""The engine for ranks of one host: shared memory."""
