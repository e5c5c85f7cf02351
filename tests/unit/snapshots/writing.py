"""Savepoints made of a shop's and of tables, and what every one of them must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn import SavepointWriter
from cairn.key_groups import key_groups
from cairn.snapshots import Savepoint, open_savepoint
from cairn.types.codec import codec
from tests.unit.snapshots.checkpoints import UID, listed, mapped, state_of, value

SHOP = {"total": value("double"), "items": listed("string"), "seen": mapped("string", "bigint")}
HELD: dict[str, dict[Any, Any]] = {
    "total": {1: 1.5, 2: 2.5, 3: 3.5, None: 4.5},
    "items": {1: ["a", "b"], 2: ["c"]},
    "seen": {1: {"x": 1, "y": 2}, 3: {"x": 3}},
}


def table(ddl: dict[str, Any], *rows: tuple[Any, ...]) -> pa.Table:
    types = {name: codec(type).arrow for name, type in ddl.items()}
    dicts = [dict(zip(ddl, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(dicts, schema=pa.schema(list(types.items())))


def totals(*rows: tuple[Any, Any]) -> pa.Table:
    return table({"k": "bigint", "value": "double"}, *rows)


def written(writer: SavepointWriter, folder: Path, name: str = "new") -> Savepoint:
    writer.write(str(folder / name))
    savepoint = open_savepoint(str(folder / name))
    assert savepoint.verify() == []
    check_groups(savepoint)
    return savepoint


def check_groups(savepoint: Savepoint) -> None:
    """Every row is in the group of its key; files ascend, and split no group."""
    for uid, saved in savepoint.info.operators.items():
        for name, held in saved.states.items():
            columns = savepoint.columns(uid)[name]
            last = -1
            for file in held.files:
                assert last < file.first_group <= file.last_group
                last = file.last_group
            batches = list(savepoint.rows(uid, name))
            assert sum(batch.num_rows for batch in batches) == held.rows
            for batch in batches:
                if saved.scope == "keyed":
                    count = savepoint.info.max_parallelism
                    expected = key_groups(batch["key"], columns.key_type, count)
                    assert batch["group"].to_pylist() == expected.tolist()


def rows_of(savepoint: Savepoint, name: str, uid: str = UID) -> Any:
    return state_of(savepoint, uid)[name]
