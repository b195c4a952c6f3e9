"""Chooses each step's tokens and assigns KV blocks to requests.  No MLX here."""
