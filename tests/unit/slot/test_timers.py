"""The index of timers: it agrees with the state, whatever happens to the state."""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cairn.backends import Backend, make_backend, timer_table
from cairn.backends.cached.backend import CachedBackend
from cairn.backends.overlay import Table, make_table
from cairn.backends.rocksdb.backend import RocksBackend
from cairn.functions import EVENT_TIMERS, timer_states
from cairn.slot import stored_timers
from cairn.slot import timers as module
from cairn.slot.stored_timers import make_index
from cairn.slot.timers import TimerIndex, as_ms, timer_text
from cairn.types.durations import MAX_MS, MIN_MS
from tests.backends import make, take_to_database

GROUP_COUNT = 4
KEYS = st.sampled_from(["a", "b", "c", "d", None])
TIMES = st.integers(0, 6)


def group_of(key: str | None) -> int:
    return 0 if key is None else ord(key) % GROUP_COUNT


def new_table(backend: Backend | None = None) -> Table:
    backend = backend or make_backend("heap", "")
    table = make_table(timer_states()[EVENT_TIMERS], pa.string(), backend, GROUP_COUNT)
    table.assign(range(GROUP_COUNT))
    return table


def new_index(backend: Backend | None = None) -> TimerIndex:
    index = make_index(new_table(backend))
    index.build()
    return index


class IndexAgainstModel(RuleBasedStateMachine):
    """A set of (time, key) is the model; another, what was committed."""

    def make_backend(self) -> Backend | None:
        return None

    @initialize()
    def start(self) -> None:
        self.index = new_index(self.make_backend())
        self.model: set[tuple[int, Any]] = set()
        self.committed: set[tuple[int, Any]] = set()
        self.waiting: set[tuple[int, Any]] = set()

    @rule(key=KEYS, time=TIMES)
    def set(self, key: str | None, time: int) -> None:
        self.index.set(group_of(key), key, time)
        self.model.add((time, key))

    @rule(key=KEYS, time=TIMES)
    def set_for_the_next_epoch(self, key: str | None, time: int) -> None:
        self.index.is_waiting = True
        self.index.set(group_of(key), key, time)
        self.index.is_waiting = False
        if (time, key) not in self.model:
            self.waiting.add((time, key))
        self.model.add((time, key))

    @rule(key=KEYS, time=TIMES)
    def delete(self, key: str | None, time: int) -> None:
        self.index.delete(group_of(key), key, time)
        self.model.discard((time, key))
        self.waiting.discard((time, key))

    @rule(until=TIMES)
    def fire(self, until: int) -> None:
        fired = []
        while (taken := self.index.take(until)) is not None:
            time, due = taken
            assert [group for group, _ in due] == [group_of(key) for _, key in due]
            fired += [(time, key) for _, key in due]
        due_now = {t for t in self.model - self.waiting if t[0] <= until}
        assert fired == sorted(due_now, key=lambda t: (t[0], t[1] is not None, t[1]))
        self.model -= due_now

    @rule(until=TIMES, count=st.integers(1, 5))
    def look_ahead(self, until: int, count: int) -> None:
        groups, keys = self.index.upcoming(until, count)
        due = sorted(t for t, _ in self.model - self.waiting if t <= until)
        assert len(keys) >= min(count, len(due))
        assert groups == [group_of(key) for key in keys]

    @rule()
    def commit(self) -> None:
        self.index.release()
        self.waiting = set()
        self.index.commit()
        self.index.table.promote()
        self.committed = self.model.copy()

    @rule()
    def roll_back(self) -> None:
        self.index.undo()
        self.index.table.rollback()
        self.waiting = set()
        self.model = self.committed.copy()

    @rule()
    def restore_from_files(self) -> None:
        batches = list(self.index.table.dump())
        table = new_table(self.make_backend())
        for batch in batches:
            table.apply(batch)
        self.index = make_index(table)
        self.index.build()
        self.model = self.committed.copy()
        self.waiting = set()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        first = min((t for t, _ in self.model - self.waiting), default=None)
        assert self.index.first() == first
        for key in ("a", "b", "c", "d", None):
            mine = sorted(t for t, k in self.model - self.waiting if k == key)
            assert self.index.of_key(key) == mine

    @invariant()
    def changes_are_what_differs_from_the_committed_state(self) -> None:
        if not hasattr(self, "index"):
            return
        changed = {
            (time, key): value is True
            for changes in self.index.table.changes
            for key, entries in changes.items()
            for time, value in entries.items()
        }
        assert changed == {timer: timer in self.model for timer in self.model ^ self.committed}


class StoredAgainstModel(IndexAgainstModel):
    """The same over a database, with memory for a few timers. It is looked at now and then only:
    to look reads timers and settles changes."""

    backend = "rocksdb"

    def __init__(self) -> None:
        super().__init__()
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(timer_table, "PAGE_TIMERS", 2)
        self.patched.setattr(stored_timers, "MEMORY_TIMERS_MAX", 5)
        self.folder = tempfile.mkdtemp()
        self.made: list[Backend] = []

    def make_backend(self) -> Backend:
        folder = f"{self.folder}/{len(self.made)}"
        self.made.append(make(self.backend, folder, 1 << 20, operator="op"))
        return self.made[-1]

    @rule()
    def write_to_the_database(self) -> None:
        take_to_database(self.made[-1], range(GROUP_COUNT))

    @rule()
    def restart(self) -> None:
        """Memory is gone, the rows are there. The running epoch never happened."""
        self.roll_back()
        self.index = make_index(self.index.table)
        self.index.build()

    def agrees(self) -> None:
        """Only in the rule below."""

    def changes_are_what_differs_from_the_committed_state(self) -> None:
        """Only in the rule below."""

    @rule()
    def look(self) -> None:
        super().agrees()

    @rule()
    def end_epoch(self) -> None:
        self.index.table.delta()
        super().changes_are_what_differs_from_the_committed_state()
        committed = sum(self.index.table.rows[group].entry_count() for group in range(GROUP_COUNT))
        assert committed == len(self.committed)

    def teardown(self) -> None:
        if self.made:
            self.commit()
            super().agrees()
        self.patched.undo()
        for backend in self.made:
            backend.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class PostgresAgainstModel(StoredAgainstModel):
    backend = "postgres"


class RedisAgainstModel(StoredAgainstModel):
    backend = "redis"


TestStoredAgainstModel = StoredAgainstModel.TestCase
TestStoredAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPostgresAgainstModel = PostgresAgainstModel.TestCase
TestPostgresAgainstModel.settings = settings(max_examples=8, stateful_step_count=30, deadline=None)
TestRedisAgainstModel = RedisAgainstModel.TestCase
TestRedisAgainstModel.settings = settings(max_examples=8, stateful_step_count=30, deadline=None)
TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_times_that_are_gone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_TIMES_MAX", 8)
    index = new_index()
    for time in range(1000):
        index.set(0, "a", time)
        index.delete(0, "a", time - 1)
    assert len(index.times) < 16
    assert index.first() == 999


def test_a_timer_set_and_deleted_in_an_epoch_leaves_no_change() -> None:
    index = new_index()
    index.set(1, "a", 5)
    index.delete(1, "a", 5)
    assert index.table.delta() is None


def test_index_of_a_narrower_range_has_only_its_keys() -> None:
    index = new_index()
    for key in "abcd":
        index.set(group_of(key), key, 7)
    index.table.promote()
    index.forget()
    index.table.assign(range(group_of("b"), group_of("b") + 1))
    index.build()
    assert index.take(7) == (7, [(group_of("b"), "b")])
    assert index.first() is None


def test_keys_of_one_time_are_in_order_of_the_keys_not_of_their_coming() -> None:
    index = new_index()
    for key in ("c", "a", None, "b"):
        index.set(group_of(key), key, 1)
    taken = index.take(1)
    assert taken is not None
    assert [key for _, key in taken[1]] == [None, "a", "b", "c"]


def test_rocksdb_index_is_built_from_what_the_database_holds(tmp_path: Path) -> None:
    backend = RocksBackend(str(tmp_path / "db"))
    index = new_index(backend)
    table = index.table
    for time, key in [(3, "a"), (1, "b"), (3, "c"), (2, "a")]:
        index.set(group_of(key), key, time)
    table.promote()
    index.delete(group_of("c"), "c", 3)
    table.promote()
    backend.flush()
    again = make_index(table)
    again.build()
    assert [again.take(9) for _ in range(4)] == [
        (1, [(group_of("b"), "b")]),
        (2, [(group_of("a"), "a")]),
        (3, [(group_of("a"), "a")]),
        None,
    ]
    backend.close()


@pytest.mark.parametrize("name", ["rocksdb", "postgres", "redis"])
def test_memory_has_only_timers_that_are_due_soon(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_table, "PAGE_TIMERS", 10)
    backend = make(name, str(tmp_path / "db"), 1 << 20, operator="op")
    index = new_index(backend)
    for number in range(4000):
        index.set(number % GROUP_COUNT, f"k{number}", number * 7)
    index.commit()
    index.table.promote()
    take_to_database(backend, range(GROUP_COUNT))
    again = make_index(index.table)
    again.build()
    assert again.times == [-MAX_MS], "nothing is read before a timer is asked for"
    assert again.first() == 0
    for number in range(1000):
        assert again.take(number * 7) == (number * 7, [(number % GROUP_COUNT, f"k{number}")])
        assert len(again.times) <= 20 * GROUP_COUNT
    assert again.take(1000 * 7 - 1) is None
    backend.close()


@pytest.mark.parametrize("name", ["rocksdb", "postgres", "redis"])
def test_many_timers_of_one_time_come_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_table, "PAGE_TIMERS", 3)
    monkeypatch.setattr(stored_timers, "MEMORY_TIMERS_MAX", 5)
    backend = make(name, str(tmp_path / "db"), 1 << 20, operator="op")
    index = new_index(backend)
    for number in range(100):
        index.set(1, f"k{number:03}", 8)
        index.set(1, f"k{number:03}", 9)
    index.commit()
    index.table.promote()
    take_to_database(backend, range(GROUP_COUNT))
    again = make_index(index.table)
    again.build()
    every = [(1, f"k{number:03}") for number in range(100)]
    assert again.take(9) == (8, every)
    assert again.take(9) == (9, every)
    assert again.take(9) is None
    backend.close()


def stored_index(tmp_path: Path, timers: list[tuple[int, str]]) -> TimerIndex:
    """An index over a database that has these timers; memory has none of them."""
    backend = RocksBackend(str(tmp_path / "db"))
    index = new_index(backend)
    for time, key in timers:
        index.set(group_of(key), key, time)
    index.commit()
    index.table.promote()
    backend.flush()
    again = make_index(index.table)
    again.build()
    return again


def test_a_timer_of_before_the_year_1_is_read_from_the_database(tmp_path: Path) -> None:
    index = stored_index(tmp_path, [(-MAX_MS, "a"), (MIN_MS - 1, "b"), (0, "c")])
    assert [index.take(0) for _ in range(4)] == [
        (-MAX_MS, [(group_of("a"), "a")]),
        (MIN_MS - 1, [(group_of("b"), "b")]),
        (0, [(group_of("c"), "c")]),
        None,
    ]
    index.table.backend.close()


def test_a_timer_that_is_set_again_for_the_next_epoch_stays_among_those_of_its_key(
    tmp_path: Path,
) -> None:
    index = stored_index(tmp_path, [(1, "a"), (3, "a")])
    index.is_waiting = True
    index.set(group_of("a"), "a", 3)
    index.set(group_of("a"), "a", 4)
    assert index.of_key("a") == [1, 3]
    index.delete(group_of("a"), "a", 3)
    index.set(group_of("a"), "a", 3)
    assert index.of_key("a") == [1]
    index.table.backend.close()


def test_no_timer_is_forgotten_when_the_database_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_table, "PAGE_TIMERS", 2)
    index = stored_index(tmp_path, [(time, "a") for time in range(1, 8)])
    assert index.first() == 1
    read, fails = CachedBackend.read_pages, True

    def read_or_fail(*arguments: Any) -> Any:
        if fails:
            raise OSError("it is away")
        return read(*arguments)

    monkeypatch.setattr(CachedBackend, "read_pages", read_or_fail)
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            index.upcoming(9, 5)
    index.undo()
    index.table.rollback()
    fails = False
    assert index.times[0] == 1, "the loop over rows looks at the heap alone"
    for time in (1, 2, 3):
        assert index.take(time) == (time, [(group_of("a"), "a")])
    fails = True
    while True:
        try:
            index.take(9)
        except OSError:
            break
    index.undo()
    index.table.rollback()
    fails = False
    assert index.times[0] == 1
    assert [time for time, _ in iter(lambda: index.take(9), None)] == [1, 2, 3, 4, 5, 6, 7]
    index.table.backend.close()


def test_a_delta_does_not_depend_on_the_timers_in_memory(tmp_path: Path) -> None:
    def run(index: TimerIndex) -> pa.RecordBatch | None:
        index.set(1, "a", 7)
        index.set(1, "e", 8)
        index.set(1, "a", 9)
        index.set(1, "a", 6)
        index.delete(1, "a", 9)
        index.set(1, "a", 9)
        index.delete(1, "e", 5)
        return index.table.delta()

    index = stored_index(tmp_path, [(7, "a"), (5, "e"), (20, "a")])
    nothing_known = run(index)
    index.undo()
    index.table.rollback()
    assert index.first() == 5
    assert index.take(4) is None
    all_known = run(index)
    assert nothing_known is not None and nothing_known.equals(all_known)
    index.table.backend.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1500, 1500),
        (-1, -1),
        (dt.datetime(1970, 1, 1, 0, 0, 1), 1000),
        (dt.datetime(1970, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))), 0),
        (dt.datetime(1969, 12, 31, 23, 59, 59, 999_500), -1),
        (MAX_MS, MAX_MS),
    ],
)
def test_a_time_is_milliseconds_or_a_datetime(given: Any, expected: int) -> None:
    assert as_ms(given) == expected


@pytest.mark.parametrize("given", ["12:00", 1.5, True, None])
def test_what_is_no_time_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="found"):
        as_ms(given)


def test_a_time_after_the_year_9999_is_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        as_ms(MAX_MS + 1)


def test_a_timer_is_named_by_kind_and_time() -> None:
    assert timer_text("event", 0) == "event at 1970-01-01T00:00:00+00:00"
    assert timer_text("event", -MAX_MS) == f"event at {-MAX_MS} ms"
