"""Messages between driver, worker and slot."""
