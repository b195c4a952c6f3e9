"""Finds the folder of a model, and reads its files."""
