"""Everything that passes between the ranks and the user: output, standard input, notices, and how the job ended."""
