"""From ``init()`` to ``shutdown()``: the ranks find each other, connect, make process sets, and end."""
