"""Tables, pictures, environments and checks of the repository."""
