"""Rows in a table of PostgreSQL."""
