"""For all tests."""

from __future__ import annotations

from hypothesis import settings

# Machines are shared: how long an example takes says nothing about it.
settings.register_profile("cairn", deadline=None)
settings.load_profile("cairn")
