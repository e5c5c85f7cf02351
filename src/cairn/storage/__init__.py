"""Checkpoints in a store: the log, manifests, files of state, retention."""
