"""Reading state: as tables, with SQL, and live from the slots."""
