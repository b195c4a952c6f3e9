"""Runs modules that need sequences instead of packed rows."""
