"""Scripts for a checkout; see CONTRIBUTING.md."""
