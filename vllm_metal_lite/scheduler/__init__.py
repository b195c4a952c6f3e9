"""Which tokens of which requests a step computes, and whose each block is.  No MLX here."""
