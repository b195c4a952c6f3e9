"""What all tools share: their frame, and servers."""
