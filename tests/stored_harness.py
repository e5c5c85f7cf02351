"""A harness whose state is in the database of its backend, and not in memory."""

from __future__ import annotations

from typing import Any

from cairn.backends.cached.backend import CachedBackend
from cairn.testing import Harness
from tests.backends import backend_name, drop_from_memory


class StoredHarness(Harness):
    """Epochs alternate: after one, its changes are unwritten; after the next, memory is empty.

    What was written is a base, which is an epoch of its own.
    """

    def __init__(self, *args: Any, backend: str = "heap", **options: Any) -> None:
        self._is_next = False
        super().__init__(*args, backend=backend_name(backend), **options)

    def commit(self) -> None:
        super().commit()
        self._is_next = not self._is_next
        holdings = self._operator.holdings
        if self._is_next or not all(isinstance(h.backend, CachedBackend) for h in holdings):
            return
        begin, rows = self._make_begin(), self._operator.rows_in
        self._append({h.uid: self._checkpoint.rebase(h, begin, rows) for h in holdings})
        for held in holdings:
            assert isinstance(held.backend, CachedBackend)
            drop_from_memory(held.backend)
