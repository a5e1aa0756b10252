"""The control plane: authenticated framed channels, the rendezvous store, and the bootstrap that finds out who is where."""
