"""Replacements for a model's caches and SDPA during a packed forward."""
