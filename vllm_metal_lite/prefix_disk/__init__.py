"""Cached prefixes on the disk, which survive a restart.  A room on top of the core."""
