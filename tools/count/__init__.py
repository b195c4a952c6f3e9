"""Launches, bytes and predictions without a Mac."""
