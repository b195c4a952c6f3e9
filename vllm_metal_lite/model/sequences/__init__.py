"""Modules that must see sequences, not packed rows."""
