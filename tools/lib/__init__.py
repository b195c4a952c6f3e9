"""Parts that several tools share: their frame, servers and their clients, and trusted engines."""
