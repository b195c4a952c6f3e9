"""Proofs that take too long for the tests, or need a GPU."""
