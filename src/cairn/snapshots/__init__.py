"""Snapshots people can steer: savepoints, rollbacks, branches, reading and comparing epochs."""
