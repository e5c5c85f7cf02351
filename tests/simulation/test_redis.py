"""State in Redis: whatever Redis, slots and drivers lose, the state is that of the checkpoint."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import KeyedProcess, state
from cairn.backends.files import drop_external
from cairn.backends.redis import backend as redis_backend
from cairn.backends.redis.backend import RedisBackend
from cairn.backends.redis.database import LostStateError
from cairn.plan.graph import Graph, Inlet, Node, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.snapshots.rollback import rollback
from cairn.snapshots.verify_redis import verify_redis
from cairn.storage.log import Log, read_job
from cairn.storage.removal import delete_checkpoint
from cairn.storage.verify import verify
from cairn.testing import SimulatedCrash, call_at_points
from cairn.types import parse_schema
from tests.backends import backend_name
from tests.marks import for_soak
from tests.servers import RedisServer
from tests.simulation.test_branch import branched_world
from tests.simulation.test_rollback import model_of
from tests.simulation.world import Driver, Transactional, World, stored_state

ROW = parse_schema("k long, seq long")
TAKEN: list[bool] = []
"""Whether Redis had what a restore needed, for each restore of a test."""


@pytest.fixture(autouse=True)
def applied_after_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply every epoch; write a base now and then."""
    monkeypatch.setenv("CAIRN_BASE_RATIO", "1.5")
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1)
    load = RedisBackend.load

    def noted(self: RedisBackend, *args: Any) -> bool:
        TAKEN.append(load(self, *args))
        return TAKEN[-1]

    TAKEN.clear()
    monkeypatch.setattr(RedisBackend, "load", noted)


@pytest.fixture(scope="module")
def own_server() -> Iterator[RedisServer]:
    """A server that tests kill."""
    server = RedisServer()
    yield server
    server.kill()


def made_world(folder: Path, seed: int = 7, url: str = "") -> World:
    folder.mkdir(exist_ok=True)
    return World(seed, folder, backend=url or backend_name("redis"))


def keys_in_redis(world: World, server: RedisServer | None = None) -> dict[bytes, Any]:
    """Return everything that the job has in Redis."""
    from tests import servers

    client = (server or servers.redis_server()).client()
    job = read_job(world.store)
    assert job is not None
    found: dict[bytes, Any] = {}
    for key in sorted(client.scan_iter(match=f"cairn:{job.job_id}:*")):
        kind = client.type(key)
        if kind == b"hash":
            found[key] = client.hgetall(key)
        else:
            is_set = kind == b"set"
            found[key] = client.smembers(key) if is_set else client.zrange(key, 0, -1)
    client.close()
    return found


def check_all_kept(world: World, *, is_compared: bool = True) -> None:
    """Every epoch that is kept has the state of its input, and Redis that of its epoch."""
    log = Log(world.store)
    for epoch in log.lineage():
        assert stored_state(world.store, world.graph(), epoch) == model_of(world, epoch).state()
    report = verify(world.store)
    assert report.ok, report.damage
    checked = verify_redis(world.store)
    assert checked.damage == []
    if is_compared:
        assert checked.groups > 0


def warm_up(world: World, batches: int = 4, **options: Any) -> Driver:
    driver = Driver(world, parallelism=2, **options)
    driver.start()
    for _ in range(batches):
        driver.run_batch(9)
    return driver


def flush(client: Any, keys: list[bytes]) -> None:
    client.flushall()


def evict_a_hash(client: Any, keys: list[bytes]) -> None:
    client.delete(next(key for key in keys if key.endswith(b":rows")))


def evict_names(client: Any, keys: list[bytes]) -> None:
    client.delete(next(key for key in keys if key.endswith(b":names")))


def lose_a_row(client: Any, keys: list[bytes]) -> None:
    key = next(key for key in keys if key.endswith(b":rows") and client.hlen(key) > 5)
    client.hdel(key, next(name for name in client.hkeys(key) if len(name) > 4))


@pytest.mark.parametrize("lose", [flush, evict_a_hash, evict_names, lose_a_row])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_redis_lost_is_noticed_and_restored(
    lose: Callable[[Any, list[bytes]], None],
    restarts: bool,
    tmp_path: Path,
    own_server: RedisServer,
) -> None:
    world = made_world(tmp_path / "w", url=own_server.url)
    driver = warm_up(world, 6)
    client = own_server.client()
    keys = list(keys_in_redis(world, own_server))
    assert keys
    lose(client, keys)
    if restarts:
        driver = warm_up(world, 0)
    for _ in range(3):
        driver.run_batch(9)
    world.check_all()
    check_all_kept(world)
    assert {key for key in keys if b":rows" in key} <= keys_in_redis(world, own_server).keys()
    client.close()


def test_an_older_copy_of_redis_is_brought_to_the_newest_epoch(
    tmp_path: Path, own_server: RedisServer
) -> None:
    world = made_world(tmp_path / "w", url=own_server.url)
    driver = warm_up(world, 6)
    client = own_server.client()
    copy = {key: client.dump(key) for key in client.scan_iter()}
    for _ in range(2):
        driver.run_batch(9)
    client.flushall()
    for key, data in copy.items():
        client.restore(key, 0, data)
    for _ in range(3):
        driver.run_batch(9)
    world.check_all()
    check_all_kept(world)
    client.close()


def test_a_restart_takes_redis_as_it_is_and_reads_only_later_deltas(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    warm_up(world, 8)
    TAKEN.clear()
    second = Driver(world, parallelism=3)
    second.start()
    second.run_batch(9)
    assert TAKEN and all(TAKEN)
    check_all_kept(world)


@pytest.mark.parametrize("back", [for_soak(1), for_soak(2), 4])
def test_a_job_rolled_back_below_what_is_applied_is_restored_from_the_checkpoint(
    back: int, tmp_path: Path
) -> None:
    world = made_world(tmp_path / "w", 21)
    warm_up(world, 7, retained_epochs=10)
    target = list(Log(world.store).lineage())[back]
    world.rest()
    markers = [
        int(held[b"v"].partition(b":")[0])
        for key, held in keys_in_redis(world).items()
        if key.endswith(b":rows")
    ]
    is_ahead = min(markers) > target.number
    assert is_ahead or back < 4
    rollback(world.store, target.number)
    second = Driver(world, parallelism=3, retained_epochs=10)
    second.start()
    assert second.coordinator.newest == target
    TAKEN.clear()
    for rows in (7, 0, 5, 3):
        second.run_batch(rows)
    assert not (is_ahead and True in TAKEN), "Redis is ahead of the epoch"
    check_all_kept(world)


def test_parent_and_branch_share_a_redis_and_each_keeps_its_state(tmp_path: Path) -> None:
    chance = random.Random(3)
    world = made_world(tmp_path / "parent", 31)
    parent = warm_up(world, 6)
    other = branched_world(world, tmp_path / "branch", back=1)
    child = Driver(other, parallelism=3, retained_epochs=2)
    child.start()
    for _ in range(10):
        if chance.random() < 0.6:
            parent.run_batch(chance.randrange(8))
        else:
            child.run_batch(chance.randrange(8))
    check_all_kept(world)
    check_all_kept(other)
    delete_checkpoint(other.store, clean=drop_external)
    check_all_kept(world)


def test_a_zombie_that_writes_after_the_takeover_changes_nothing(tmp_path: Path) -> None:
    world = made_world(tmp_path / "w")
    old = warm_up(world, 6)
    slot = old.cluster.slot(0)
    holding = slot.level(0).operators[0].state
    slot.compactor.cancel(holding.uid)
    # The old slot has changes that Redis has not, and is paused.
    applying = holding.backend.begin_apply(holding.groups)
    parent, term = old.coordinator.newest, old.coordinator.term
    assert parent is not None
    new = warm_up(world, 3)
    before = keys_in_redis(world)
    with pytest.raises(LostStateError):
        applying.apply(term, parent.number, parent.nonce, lambda: None)
    applying.close()
    assert keys_in_redis(world) == before
    new.run_batch(9)
    check_all_kept(world)


def test_the_job_waits_for_a_redis_that_is_away(tmp_path: Path, own_server: RedisServer) -> None:
    world = made_world(tmp_path / "w", url=own_server.url)
    warm_up(world, 6)
    second = Driver(world, parallelism=3)
    second.start()
    paused: list[str] = []
    own_server.kill()
    try:
        slept = world.clock.sleep

        def note(seconds: float) -> None:
            slept(seconds)
            if second.coordinator.paused is not None:
                paused.append(str(second.coordinator.paused))
                if len(paused) == 2:
                    own_server.start()

        second.coordinator._sleep = second.coordinator._publisher._sleep = note
        runner = threading.Thread(target=second.run_batch, args=(9,))
        runner.start()
        runner.join(120)
        assert not runner.is_alive()
    finally:
        own_server.start()
    assert paused and paused[0].startswith("database ") and "cannot be reached" in paused[0]
    second.run_batch(9)
    world.check_all()
    check_all_kept(world)


def test_removing_a_checkpoint_removes_its_keys_and_no_others(tmp_path: Path) -> None:
    world, other = made_world(tmp_path / "w"), made_world(tmp_path / "other", 8)
    warm_up(world)
    warm_up(other)
    kept = keys_in_redis(other)
    gone = keys_in_redis(world)
    assert gone and kept
    job = read_job(world.store)
    assert delete_checkpoint(world.store, clean=drop_external).unreleased == []
    from tests import servers

    client = servers.redis_server().client()
    assert job is not None
    assert list(client.scan_iter(match=f"*{job.job_id}*")) == []
    client.close()
    assert keys_in_redis(other) == kept


def test_rows_that_somebody_changed_are_damage(tmp_path: Path) -> None:
    from tests import servers

    world = made_world(tmp_path / "w")
    warm_up(world)
    client = servers.redis_server().client()
    rows = next(k for k, held in keys_in_redis(world).items() if b":rows" in k and len(held) > 5)
    name = max(client.hkeys(rows), key=len)
    client.hdel(rows, name)
    client.zrem(rows.replace(b":rows", b":names"), name)
    client.close()
    (damage,) = verify_redis(world.store).damage
    assert "1 rows are missing" in damage[1]


class MemoryWorld(World):
    """Remembers the last row of each key, in a state with a type that changes."""

    last: Any = state.Value("int")
    keys: tuple[int, ...] = (0, 1, 2, 3)

    def graph(self) -> Graph:
        class Last(KeyedProcess[Any]):
            last = self.last

            def process(self, row: Any, ctx: Any) -> Any:
                before = self.last.get(-1)
                self.last.set(row.seq)
                return row.seq, before

        nodes: dict[str, Node] = {
            "rows": SourceNode("rows", None, ROW, None, None),
            "last": ProcessNode(
                "last", (Inlet((Port("rows"),), ("k",)),), Last(), parse_schema("a long, b long")
            ),
            "told": SinkNode("told", (Port("last"),), Transactional(self.published.url)),
        }
        return build_graph("last", self.group_count, nodes)

    def arrow(self, start: int, stop: int) -> pa.StructArray:
        rows = [{"k": self.keys[seq], "seq": seq} for seq in range(start, stop)]
        return pa.array(rows, pa.struct(list(ROW)))


def run_and_apply(driver: Driver, rows: int, *, crashes: bool = False) -> None:
    """Run a batch; bring Redis to its parent epoch before it is committed."""

    def apply(passed: str) -> None:
        if passed == "driver.epoch.ran":
            driver.cluster.slot(0).compactor.work()
            if crashes:
                raise SimulatedCrash(passed)

    with call_at_points(apply):
        driver.run_batch(rows)


def test_a_state_of_another_type_keeps_its_rows_if_redis_has_the_newest_epoch(
    tmp_path: Path,
) -> None:
    world = MemoryWorld(7, tmp_path, backend=backend_name("redis"))
    world.keys = (0, 1, 2, 3, 0, 0, 0, 3)
    driver = Driver(world, parallelism=1)
    driver.start()
    driver.run_batch(4)
    with pytest.raises(SimulatedCrash):
        run_and_apply(driver, 0, crashes=True)
    world.last = state.Value("long")
    second = Driver(world, parallelism=1)
    second.start()
    for rows in (0, 1, 1):
        run_and_apply(second, rows)
        assert verify_redis(world.store).damage == []
    third = Driver(world, parallelism=1)
    third.start()
    third.run_batch(2)
    assert TAKEN[-1]
    assert (7, 3) in set(world.seen())


def test_rows_that_have_expired_are_not_missing(tmp_path: Path) -> None:
    world = MemoryWorld(7, tmp_path, backend=backend_name("redis"))
    world.last = state.Value("long", ttl=state.TTL("10 seconds"))
    driver = Driver(world, parallelism=1)
    driver.start()
    driver.run_batch(3)
    world.clock.advance_ms(11_000)
    second = Driver(world, parallelism=1)
    second.start()
    run_and_apply(second, 1)
    checked = verify_redis(world.store)
    assert checked.damage == [] and checked.groups


def test_no_file_of_the_checkpoint_has_the_password(
    tmp_path: Path, own_server: RedisServer
) -> None:
    client = own_server.client()
    client.config_set("requirepass", "s3cret")
    try:
        url = own_server.url.replace("//", "//:s3cret@")
        world = made_world(tmp_path / "w", url=url)
        warm_up(world, 5)
        assert keys_in_redis_with(world, own_server, "s3cret")
        for there in world.store.list():
            assert b"s3cret" not in world.store.get(there.path), there.path
        check_all_kept(world)
    finally:
        client.config_set("requirepass", "")
        client.close()


def keys_in_redis_with(world: World, server: RedisServer, password: str) -> list[bytes]:
    client = server.client(password)
    found = list(client.scan_iter(match="cairn:*"))
    client.close()
    return found
