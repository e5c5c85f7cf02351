"""State in Redis: one version, refilled from the checkpoint when Redis has lost it."""
