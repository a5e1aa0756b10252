"""Agreement between ranks on what runs next: rank 0 of a process set coordinates, the others are members."""
