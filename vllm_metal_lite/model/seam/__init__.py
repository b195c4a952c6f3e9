"""Replacements for a model's caches and SDPA during a packed forward, on rows or in sequences."""
