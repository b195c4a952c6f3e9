"""The host table of running requests, and numpy code that builds each step from it."""
