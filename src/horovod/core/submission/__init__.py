"""What a call of a collective becomes: arguments, request, handle."""
