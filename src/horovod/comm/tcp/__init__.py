"""The engine over stream sockets: TCP between hosts, and within a host TCP or Unix sockets."""
