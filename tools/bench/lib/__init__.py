"""Shared parts of the measurements."""
