"""The demo model: data, training, recall."""
