"""The command line. Commands that only look at a checkpoint never start Spark."""

from cairn.cli.app import app, main

__all__ = ["app", "main"]
