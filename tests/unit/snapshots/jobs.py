"""State of a job that runs, by key, and jobs that start from its savepoints."""

from __future__ import annotations

from typing import Any

from cairn.snapshots import EpochReader, Savepoint, open_savepoint, write_savepoint
from cairn.storage.manifest import Epoch
from cairn.storage.store import Store, open_store
from cairn.types.codec import codec
from tests.simulation.world import World
from tests.unit.snapshots.checkpoints import state_of
from tests.unit.snapshots.savepoints import SPARK_FOLDER, load

State = dict[str, dict[Any, dict[str, Any]]]


def by_key(reader: EpochReader | Savepoint, uids: list[str]) -> State:
    """As `stored_state` gives it: operator, key, state."""
    found: State = {}
    for uid in uids:
        keys: dict[Any, dict[str, Any]] = found.setdefault(uid, {})
        columns = reader.columns(uid)
        for name, rows in state_of(reader, uid).items():
            restore = codec(columns[name].declaration.type).restore
            for key, held in rows.items():
                keys.setdefault(key, {})[name] = _restored(columns[name].decl.kind, restore, held)
    return found


def _restored(kind: str, restore: Any, held: Any) -> Any:
    if kind == "list":
        return [restore(item) for item in held]
    if kind == "map":
        return {entry: None if v is None else restore(v) for entry, v in held.items()}
    return restore(held)


def newest(world: World) -> Epoch:
    epoch = world.newest()
    assert epoch is not None
    return epoch


def take(world: World) -> Savepoint:
    dest = open_store("memory:")
    world.rest()
    write_savepoint(world.store, None, dest.url)
    return open_savepoint(dest.url)


def start_from(savepoint: Savepoint, parallelism: int) -> Store:
    """What a driver does before its first epoch, in an empty checkpoint."""
    store, epoch = load(savepoint, parallelism)
    batch_id = epoch.spark.batch_id
    store.put(f"{SPARK_FOLDER}/offsets/{batch_id}", epoch.spark.offsets.encode())
    store.put(f"{SPARK_FOLDER}/commits/{batch_id}", b"v1\n{}")
    return store
