"""State in typed arrays."""
