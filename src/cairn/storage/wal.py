"""Where rows wait in a checkpoint until their sink has published them.

What lies there belongs to the sinks: they remove it when it is published, and what was
abandoned after a takeover. It is no state: branches and savepoints do without it.
"""

from __future__ import annotations

from typing import Final

WAL_FOLDER: Final = "wal"
