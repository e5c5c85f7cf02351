"""Aggregates on columns: what is asked for, what Spark prepares, how the slot merges it."""
