"""The host table of running requests, and the steps that are cut out of it with numpy."""
