"""From a call of a collective to the queue of a worker: arguments, request, handle."""
