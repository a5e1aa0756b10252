"""The engine for several hosts with several ranks each: in the host, between the hosts, and in the host again."""
