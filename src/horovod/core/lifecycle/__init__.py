"""From ``init()`` to ``shutdown()``: ranks find each other, connect, make process sets, and end."""
