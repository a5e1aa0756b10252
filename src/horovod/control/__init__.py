"""The control plane: authenticated channels, the rendezvous of the ranks, their connections, and the liveness monitor."""
