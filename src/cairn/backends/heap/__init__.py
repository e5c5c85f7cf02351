"""State in the slot's memory."""
