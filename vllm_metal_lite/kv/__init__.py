"""Device storage of K, V and recurrent states."""
