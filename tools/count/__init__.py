"""Counts the launches of a step without a Mac."""
