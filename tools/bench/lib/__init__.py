"""What several measurements share."""
