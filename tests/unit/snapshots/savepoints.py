"""A shop's checkpoint, with a state of every kind; its savepoints, and checkpoints made of them."""

from __future__ import annotations

from typing import Any

from cairn.snapshots import Savepoint, load_savepoint, open_savepoint, write_savepoint
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.manifest import Epoch, StateDecl
from cairn.storage.paths import HOLDS_FOLDER
from cairn.storage.store import Store, open_store
from tests.unit.snapshots.checkpoints import GONE, Checkpoint, listed, mapped, value

STATES = {"n": value("bigint"), "items": listed("string"), "last": mapped("string", "double")}
OBJECTS = {**STATES, "o": value("object")}
SPARK_FOLDER = "spark/000000000001"


def shop(states: dict[str, StateDecl] = STATES, **more: Any) -> Checkpoint:
    checkpoint = Checkpoint(states, **more)
    checkpoint.commit({"n": {k: k for k in range(60)}, "items": {k: ["a"] for k in range(9)}})
    checkpoint.commit({"last": {k: {"x": 1.0, "y": None} for k in range(20)}}, base=True)
    checkpoint.commit({"n": {3: GONE}, "items": {1: ["a", "b"], 2: GONE}, "last": {1: GONE}})
    return checkpoint


def saved(checkpoint: Checkpoint, epoch: int | None = None, url: str = "memory:") -> Savepoint:
    dest = open_store(url)
    write_savepoint(checkpoint.store, epoch, dest.url)
    return open_savepoint(dest.url)


def holds(store: Store) -> list[str]:
    return [found.path for found in store.list(HOLDS_FOLDER)]


def load(savepoint: Savepoint, parallelism: int, store: Store | None = None) -> tuple[Store, Epoch]:
    """The store of a new checkpoint, and its first epoch as read back from the log."""
    store = store or open_store("memory:")
    create_or_open_job(store, savepoint.info.job, savepoint.info.max_parallelism)
    log = Log(store)
    term = log.take_over(host="", pid=0, wall_ms=0).term
    log.append(
        lambda number: load_savepoint(
            savepoint,
            store,
            number=number,
            term=term,
            parallelism=parallelism,
            spark_folder=SPARK_FOLDER,
            wall_ms=5,
        )
    )
    epoch = Log(store).newest_epoch()
    assert epoch is not None
    return store, epoch
