"""How the launcher starts an agent on another host, and talks to it."""
