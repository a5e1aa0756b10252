"""One collective in flight: the memory that it reads and writes, the handle that its caller waits for, the batch that it runs
in."""
