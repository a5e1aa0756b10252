"""The engine for several hosts with several ranks each: within the host, between the hosts, and within the host again."""
