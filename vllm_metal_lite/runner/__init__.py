"""One step: assembled, compiled, submitted, read."""
