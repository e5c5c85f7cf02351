"""Rows in a Delta table."""
