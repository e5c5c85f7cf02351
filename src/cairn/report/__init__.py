"""What was measured and planned, as text, HTML and drawings."""
