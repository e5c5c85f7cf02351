"""State in PostgreSQL: rows with versions."""
