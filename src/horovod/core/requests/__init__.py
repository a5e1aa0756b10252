"""One collective on its way: the memory it reads and writes, the handle that its caller waits for, the batch it runs in."""
