"""One process's runtime: requests, agreement, order, execution. Imports no framework and no launcher."""
