"""Measured epochs and planned jobs, as structs, text, HTML and drawings."""
