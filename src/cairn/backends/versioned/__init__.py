"""State in a database that keeps versions of rows."""
