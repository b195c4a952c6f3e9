"""Where K and V live: the device store, and the host's account of its blocks."""
