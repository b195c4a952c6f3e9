"""Where K, V and recurrent states live on the device."""
