"""Launches of a step without a Mac."""
