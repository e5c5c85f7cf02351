"""State in the slot's memory: a dict per state and key group."""

from __future__ import annotations

from typing import Any

from cairn.backends.base import Backend


class HeapBackend(Backend):
    """The fastest backend, for state that fits in memory."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], dict[Any, Any]] = {}

    def rows(self, state: str, group_index: int) -> dict[Any, Any]:
        return self._rows.setdefault((state, group_index), {})

    def drop(self, state: str, group_index: int) -> None:
        self._rows.pop((state, group_index), None)

    def close(self) -> None:
        self._rows.clear()
