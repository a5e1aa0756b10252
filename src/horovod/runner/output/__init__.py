"""Output, standard input, notices, and how the job ended: all that passes between the ranks and the user."""
