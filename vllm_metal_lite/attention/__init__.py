"""How packed queries meet the paged store."""
