"""Ready-made functions: windows, joins, deduplication, aggregates."""
