"""One state, bound to a key, without an operator around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from cairn.backends import Backend, HeapBackend
from cairn.backends.handles import make_handle
from cairn.backends.overlay import Table, make_table
from cairn.state import Declaration

GROUP_COUNT = 4
Make = Callable[[], Backend]


class Scope:
    def __init__(self) -> None:
        self.key: Any = 1
        self.group = 0


class Bound:
    """A table with its handle; `at` chooses the key."""

    def __init__(
        self, declaration: Declaration, key_type: Any = None, make: Make = HeapBackend
    ) -> None:
        self.make = make
        self.declaration = declaration
        declaration.name = "s"
        self.key_type = key_type or pa.int64()
        self.scope = Scope()
        self.table: Table = make_table(declaration, self.key_type, make(), GROUP_COUNT)
        self.table.assign(range(GROUP_COUNT))
        self.handle: Any = make_handle(self.table, self.scope)  # type: ignore[arg-type]

    def at(self, key: Any, group: int = 0) -> Any:
        self.scope.key, self.scope.group = key, group
        return self.handle

    def commit(self) -> pa.RecordBatch | None:
        """The epoch's delta; its changes are the state from here on."""
        delta = self.table.delta()
        self.table.promote()
        return delta

    def rollback(self) -> None:
        self.table.rollback()

    def loaded(self, *batches: pa.RecordBatch | None) -> Bound:
        """The same state in another slot, from these files."""
        other = Bound(self.declaration, self.key_type, self.make)
        for batch in batches:
            if batch is not None:
                other.table.apply(batch)
        return other
