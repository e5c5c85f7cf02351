"""An operator restored from a checkpoint, to look at its state without a slot."""

from __future__ import annotations

import tempfile
from typing import Any

from cairn.backends import make_backend
from cairn.backends.columnar.table import ColumnTable
from cairn.backends.overlay import Table
from cairn.protocol.spec import OperatorSpec
from cairn.slot.operator import Operator
from cairn.slot.restore import restore
from cairn.storage.log import Log
from cairn.storage.store import Store
from cairn.types.codec import codec


def fresh_operator(spec: OperatorSpec, groups: range, group_count: int) -> Operator:
    """One that owns these key groups and holds nothing."""
    operator = Operator(spec, make_backend("heap", "", 1 << 26), group_count=group_count)
    operator.declare()
    operator.state.bring_to("", groups, [])
    return operator


def restored_operator(
    spec: OperatorSpec, store: Store, epoch_number: int, group_count: int
) -> Operator:
    """One that owns every key group, as of an epoch."""
    operator = fresh_operator(spec, range(group_count), group_count)
    with tempfile.TemporaryDirectory() as scratch:
        epoch = Log(store).epoch(epoch_number)
        restore(operator.state, store, epoch, [operator.state.groups], scratch)
    return operator


def held_contents(table: Table) -> dict[Any, Any]:
    """Return the committed content of each key: a value, a mapping of entries or a list."""
    if isinstance(table, ColumnTable):
        assert not table.is_map, "entries in arrays are listed by stored_rows"
        return stored_rows(table)
    return {key: content for group in table.groups for key, content in table.rows[group].items()}


def stored_rows(table: Table) -> dict[Any, Any]:
    """What a table holds as of the last commit, by key; of a map by key and entry."""
    found: dict[Any, Any] = {}
    for batch in table.dump():
        names = table.keys.decode_keys(batch["key"])
        if "entry" in batch.schema.names:
            entries = codec(batch["entry"].type).decode_keys(batch["entry"])
            names = list(zip(names, entries, strict=True))
        found |= dict(zip(names, table.values.decode(batch["value"]), strict=True))
    return found
