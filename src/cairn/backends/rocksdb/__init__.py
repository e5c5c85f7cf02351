"""State in RocksDB, on the slot's disk."""
