"""State in PostgreSQL: rollbacks, branches, zombies, outages and removal leave the right state."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from cairn import SavepointWriter
from cairn.backends import BaseTarget
from cairn.backends.files import drop_external
from cairn.backends.versioned.collection import VersionCollector
from cairn.backends.versioned.contract import FencedError, place_of
from cairn.backends.versioned.index import FORMATS, read_index, verify_base
from cairn.errors import RestoreError
from cairn.snapshots import EpochReader, diff_epochs, open_savepoint
from cairn.snapshots.rollback import rollback
from cairn.storage.log import Log, read_job
from cairn.storage.references import files_of
from cairn.storage.removal import delete_checkpoint
from cairn.storage.verify import verify
from cairn.testing import SimulatedCrash, call_at_points
from tests import servers
from tests.backends import SERVERS, VERSIONED, backend_name
from tests.marks import for_soak
from tests.simulation.test_branch import branched_world
from tests.simulation.test_rollback import model_of
from tests.simulation.world import Driver, World, stored_state
from tests.unit.snapshots.jobs import by_key


@pytest.fixture(autouse=True)
def bases_after_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")


def made_world(folder: Path, seed: int = 7, backend: str = "postgres") -> World:
    folder.mkdir(exist_ok=True)
    return World(seed, folder, backend=backend_name(backend))


def query(world: World, text: str) -> list[Any]:
    job = read_job(world.store)
    assert job is not None
    with psycopg.connect(world.backend, autocommit=True) as connection:
        found = connection.execute(text.replace("{s}", place_of(job.job_id)))  # type: ignore[arg-type]
        return found.fetchall() if found.description else []


def check_all_kept(world: World) -> None:
    """Every epoch that is kept has the state of its input."""
    log = Log(world.store)
    for epoch in log.lineage():
        assert stored_state(world.store, world.graph(), epoch) == model_of(world, epoch).state()
    report = verify(world.store, checkers=dict.fromkeys(FORMATS, verify_base))
    assert report.ok, report.damage


def has_external_base(world: World) -> bool:
    newest = world.newest()
    assert newest is not None
    return any(file.format in FORMATS for file in files_of(newest))


def collect(world: World, driver: Driver) -> int:
    job = read_job(world.store)
    assert job is not None
    return VersionCollector(world.store, job.job_id, driver.coordinator.term).collect()


@pytest.mark.parametrize(
    ("back", "backend"), [for_soak(1, "postgres"), (4, "postgres"), (4, "sqlite")]
)
def test_a_job_rolled_back_sees_nothing_of_the_epochs_that_were_undone(
    back: int, backend: str, tmp_path: Path
) -> None:
    world = made_world(tmp_path / "w", 21, backend)
    first = Driver(world, parallelism=2, retained_epochs=10)
    first.start()
    for _ in range(6):
        first.run_batch(7)
    target = list(Log(world.store).lineage())[back]
    world.rest()
    rollback(world.store, target.number)
    second = Driver(world, parallelism=3, retained_epochs=10)
    second.start()
    assert second.coordinator.newest == target
    for rows in (7, 0, 5, 3):
        second.run_batch(rows)
    check_all_kept(world)
    collect(world, second)
    check_all_kept(world)


@pytest.mark.parametrize("backend", VERSIONED)
def test_parent_and_branch_share_rows_and_each_keeps_its_state(
    backend: str, tmp_path: Path
) -> None:
    chance = random.Random(3)
    world = made_world(tmp_path / "parent", 31, backend)
    parent = Driver(world, parallelism=2, retained_epochs=3)
    parent.start()
    for _ in range(6):
        parent.run_batch(7)
    other = branched_world(world, tmp_path / "branch", back=1)
    child = Driver(other, parallelism=3, retained_epochs=2)
    child.start()
    for step in range(16):
        if chance.random() < 0.6:
            parent.run_batch(chance.randrange(8))
        else:
            child.run_batch(chance.randrange(8))
        if step % 8 == 7:
            collect(world, parent)
            collect(other, child)
            check_all_kept(world)
            check_all_kept(other)
    with pytest.raises(RestoreError, match="needed by its branches"):
        delete_checkpoint(world.store, clean=drop_external)
    delete_checkpoint(other.store, clean=drop_external)
    check_all_kept(world)


def test_versions_that_no_kept_epoch_needs_are_removed(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    driver = Driver(world, parallelism=2, retained_epochs=2)
    driver.start()
    for _ in range(12):
        driver.run_batch(9)
    versions = query(world, "select count(*) from {s}.rows")[0][0]
    assert collect(world, driver) > 0
    check_all_kept(world)
    names = query(world, "select count(*) from (select distinct grp, state, name from {s}.rows) n")
    left = query(world, "select count(*) from {s}.rows")[0][0]
    assert left < versions and left <= 4 * names[0][0]
    assert collect(world, driver) == 0, "nothing is left to remove"
    driver.run_batch(9)
    check_all_kept(world)


def test_rows_that_a_killed_slot_has_left_count_nowhere_and_are_removed(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    driver = Driver(world, parallelism=2, retained_epochs=2)
    driver.start()
    for _ in range(4):
        driver.run_batch(9)
    passes = 0

    def kill_once(point: str) -> None:
        nonlocal passes
        passes += point == "slot.rows.applied"
        if point == "slot.rows.applied" and passes == 1:
            raise SimulatedCrash(point)

    with call_at_points(kill_once):
        for _ in range(8):
            driver.run_batch(9)
    assert passes > 1
    check_all_kept(world)
    assert collect(world, driver) > 0
    layers = [
        part.history[0]
        for epoch in Log(world.store).lineage()
        for file in files_of(epoch)
        if file.format in FORMATS
        for part in read_index(world.store, file).parts
    ]
    assert any(len(layer.epochs) > 1 for layer in layers), "the epoch of the kill is left out"
    for (epoch,) in query(world, "select distinct epoch from {s}.rows"):
        assert any(layer.lists(epoch) for layer in layers), epoch
    check_all_kept(world)


def test_a_zombie_that_writes_after_the_takeover_changes_nothing(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    old = Driver(world, parallelism=2)
    old.start()
    for _ in range(3):
        old.run_batch(9)
    slot = old.cluster.slot(0)
    holding = slot.level(0).operators[0].state
    slot.compactor.cancel(holding.uid)
    # The old slot has changes that no base has, and is paused.
    base = holding.backend.begin_base(holding.tables, holding.groups)
    parent = old.coordinator.newest
    assert parent is not None
    target = BaseTarget(
        world.store, old.coordinator.term, holding.uid, parent.number, str(tmp_path), 0
    )
    new = Driver(world, parallelism=2)
    new.start()
    for _ in range(3):
        new.run_batch(9)
    before = query(world, "select * from {s}.rows order by grp, state, name, epoch")
    with pytest.raises(FencedError):
        base.write(target, lambda: None)
    base.close()
    assert query(world, "select * from {s}.rows order by grp, state, name, epoch") == before
    check_all_kept(world)


def test_the_job_waits_for_a_database_that_is_away(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    first = Driver(world, parallelism=2)
    first.start()
    for _ in range(3):
        first.run_batch(9)
    server = servers.postgres()
    second = Driver(world, parallelism=3)
    second.start()
    paused: list[str] = []
    server.stop()
    try:
        slept = world.clock.sleep

        def note(seconds: float) -> None:
            slept(seconds)
            if second.coordinator.paused is not None:
                paused.append(str(second.coordinator.paused))
                if len(paused) == 2:
                    server.start()

        second.coordinator._sleep = second.coordinator._publisher._sleep = note
        runner = threading.Thread(target=second.run_batch, args=(9,))
        runner.start()
        runner.join(120)
        assert not runner.is_alive()
    finally:
        server.start()
    assert paused and paused[0].startswith("database ") and "cannot be reached" in paused[0]
    assert "password" not in paused[0]
    world.check_all()
    check_all_kept(world)


def test_removing_a_checkpoint_drops_its_schema(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    driver = Driver(world, parallelism=2)
    driver.start()
    for _ in range(2):
        driver.run_batch(9)
    schemas = "select nspname from pg_namespace where nspname = '{s}'"
    text = schemas.replace("{s}", query(world, "select '{s}'")[0][0])
    assert len(query(world, text)) == 1
    assert delete_checkpoint(world.store, clean=drop_external).unreleased == []
    with psycopg.connect(world.backend) as connection:
        assert connection.execute(text).fetchall() == []  # type: ignore[arg-type]


def test_a_base_that_the_database_lacks_is_damage(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    driver = Driver(world, parallelism=2)
    driver.start()
    for _ in range(2):
        driver.run_batch(9)
    query(world, "drop schema {s} cascade")
    report = verify(world.store, checkers=dict.fromkeys(FORMATS, verify_base))
    assert not report.ok and "has no schema" in report.damage[0].what


def test_the_view_shows_the_newest_state_as_json(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    driver = Driver(world, parallelism=1, retained_epochs=10)
    driver.start()
    for _ in range(4):
        driver.run_batch(9)
    applied = dict(query(world, "select distinct operator, applied from {s}.ranges"))
    shown = query(world, "select operator, state, key, entry, value from {s}.state")
    assert shown
    for uid, epoch in applied.items():
        found: dict[Any, dict[str, Any]] = {}
        for operator, state, key, entry, value in shown:
            if operator == uid and entry is None:
                found.setdefault(key, {})[state] = list(value) if state == "span" else value
            elif operator == uid:
                held = found.setdefault(key, {}).setdefault(state, {})
                held[entry] = value
        expected = model_of(world, Log(world.store).epoch(epoch)).state()[uid]
        for key, states in expected.items():
            for state, held in states.items():
                if isinstance(held, tuple):
                    held = list(held)
                if state == "note":
                    continue  # It is pickled.
                if state == "items":
                    held = dict(enumerate(held))
                assert found[key][state] == held, (uid, key, state)
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("backend", SERVERS)
def test_differences_and_edited_savepoints_are_made_of_what_the_database_has(
    backend: str, tmp_path: Path
) -> None:
    world = made_world(tmp_path / "w", backend=backend)
    driver = Driver(world, parallelism=2, retained_epochs=10)
    driver.start()
    for _ in range(5):
        driver.run_batch(9)
    new, *_, old = Log(world.store).lineage()
    before, after = model_of(world, old).state(), model_of(world, new).state()
    (uid,) = {uid for uid, keys in after.items() if any("count" in held for held in keys.values())}
    counts = [
        {key: held["count"] for key, held in of.get(uid, {}).items() if "count" in held}
        for of in (before, after)
    ]
    (found,) = diff_epochs(world.store, old.number, new.number, operator=uid, state="count")
    assert found.added == len(counts[1].keys() - counts[0].keys())
    changed = {k for k in counts[0].keys() & counts[1].keys() if counts[0][k] != counts[1][k]}
    assert {each.key for each in found.changed_examples} == changed
    assert found.added and changed

    key = next(iter(counts[1]))
    world.rest()
    writer = SavepointWriter.of(None, world.store.url)
    writer.patch(uid, "count", pa.table({"account": [key], "value": [1_000]}))
    writer.write(str(tmp_path / "edited"))
    edited = open_savepoint(str(tmp_path / "edited"))
    assert by_key(edited, [uid])[uid] == {
        k: {**held, "count": 1_000} if k == key else held for k, held in after[uid].items()
    }


def test_no_file_of_the_checkpoint_has_the_password(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    # The server of the tests asks for none, so any is right.
    world.backend = world.backend.replace("postgres:@", "postgres:s3cret@")
    assert "s3cret" in world.backend
    driver = Driver(world, parallelism=2)
    driver.start()
    for _ in range(3):
        driver.run_batch(9)
    assert has_external_base(world)
    for there in world.store.list():
        assert b"s3cret" not in world.store.get(there.path), there.path


def test_readers_see_the_state_of_every_kept_epoch(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    driver = Driver(world, parallelism=2, retained_epochs=10)
    driver.start()
    for _ in range(5):
        driver.run_batch(9)
    new, *_, old = Log(world.store).lineage()
    before, after = model_of(world, old).state(), model_of(world, new).state()
    for uid in after:
        with EpochReader(world.store, old) as one, EpochReader(world.store, new) as two:
            assert by_key(one, [uid])[uid] == before.get(uid, {})
            assert by_key(two, [uid])[uid] == after[uid]
