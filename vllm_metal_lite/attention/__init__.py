"""Attention of packed queries over the paged store."""
