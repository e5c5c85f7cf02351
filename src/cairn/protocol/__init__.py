"""What driver, worker and slot send each other."""
