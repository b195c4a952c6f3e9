"""Drafts: tokens that a request will probably have, computed before they are sampled."""
