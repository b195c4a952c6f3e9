"""An engine in a process of its own, and the server's side of it."""
