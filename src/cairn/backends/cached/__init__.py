"""State in a database, with a part of it in memory."""
