"""How the ranks of a job find each other in `init()`: the interface, the server and its client, and one file for each way."""
