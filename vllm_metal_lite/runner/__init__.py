"""Assembles, compiles, submits and reads steps."""
