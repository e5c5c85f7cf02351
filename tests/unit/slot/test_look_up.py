"""Lookups on other threads, while epochs write, fail, are promoted and their bases written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cairn import state
from cairn.backends import make_backend
from cairn.backends.contract import BaseCancelledError, BaseTarget
from cairn.backends.handles import make_batch_handle, make_batch_table, make_handle
from cairn.backends.overlay import make_table
from cairn.backends.packing import form_of, pack_held, packing_of, unpack_held
from cairn.functions import EVENT_TIMERS, timer_states
from cairn.key_groups import key_hasher
from cairn.protocol.messages import Piece
from cairn.slot import holding as slot_holding
from cairn.slot.holding import INCOMPLETE, Holding
from cairn.storage.manifest import EMPTY_VERSION
from cairn.storage.store import open_store

GROUP_COUNT = 4
PAIRS = 200
EPOCHS = 14
hash_key = key_hasher([pa.int64()])


def group_of(key: int) -> int:
    return hash_key([key]) % GROUP_COUNT


class Written:
    """State of one kind in a holding; every epoch gives both keys of a pair the same number."""

    def __init__(self, kind: str, backend: str, scratch: Path, memory_bytes: int = 1 << 26) -> None:
        declared: dict[str, Any] = {
            "value": state.Value("long"),
            "map": state.Map("long", "long"),
            "list": state.List("long"),
        }
        self.kind, self.by_batch = kind, backend == "columns"
        self.declaration = declared[kind]
        self.declaration.name = "s"
        made = make_backend("heap" if self.by_batch else backend, str(scratch / "db"), memory_bytes)
        self.holding = Holding("op", pa.int64(), made, group_count=GROUP_COUNT)
        make = make_batch_table if self.by_batch else make_table
        self.holding.declare({"s": self.declaration}, make)
        self.holding.bring_to(EMPTY_VERSION, range(GROUP_COUNT), [])
        self.holding.version = EMPTY_VERSION
        self.scope: Any = SimpleNamespace(group=0, key=None)
        self.table = self.holding.tables["s"]
        if self.by_batch:
            self.handle: Any = make_batch_handle(self.table)
        else:
            self.handle = make_handle(self.table, self.scope)
        self.committed = (EMPTY_VERSION, 0)
        """Version and number of the newest committed epoch."""

    def write(self, number: int, pairs: range) -> None:
        if self.by_batch:
            keys = pa.array([key for pair in pairs for key in (2 * pair, 2 * pair + 1)])
            values = pa.array([number] * len(keys))
            if self.kind == "map":
                self.handle.put_many(keys, pa.array([0] * len(keys)), values)
                self.handle.put_many(keys, values, values)
            else:
                self.handle.put_many(keys, values)
            return
        for pair in pairs:
            for key in (2 * pair, 2 * pair + 1):
                self.scope.group, self.scope.key = group_of(key), key
                if self.kind == "value":
                    self.handle.set(number)
                elif self.kind == "map":
                    self.handle[0] = number
                    self.handle[number] = number
                else:
                    self.handle.append(number)

    def finish(self, number: int) -> None:
        self.holding.delta("op")
        self.holding.name_pending(f"delta {number}")

    def commit(self, number: int) -> None:
        assert self.holding.pending is not None
        self.committed = (self.holding.pending, number)

    def begin(self) -> None:
        missing = self.holding.bring_to(self.committed[0], range(GROUP_COUNT), [])
        assert not missing

    def look_up(self, version: str, keys: list[int]) -> list[Any] | None:
        packing = packing_of(self.table)
        places = [(group_of(key), packing.key(key)) for key in keys]
        found = self.holding.look_up("s", version, form_of(self.declaration), places)
        if found is None:
            return None
        return [None if raw is None else unpack_held(packing, raw) for raw in found[0]]

    def expected(self, number: int, pairs_per_epoch: int, pair: int) -> Any:
        """What a key of a pair holds after so many epochs, which wrote the pairs in turns."""
        wrote = [n for n in range(1, number + 1) if pair in touched(n, pairs_per_epoch)]
        if not wrote:
            return None
        if self.kind == "value":
            return wrote[-1]
        if self.kind == "list":
            return wrote
        return {0: wrote[-1], **{n: n for n in wrote}}


def touched(number: int, pairs_per_epoch: int) -> range:
    start = number * 37 % PAIRS
    return range(start, min(start + pairs_per_epoch, PAIRS))


CASES = [
    ("value", "heap"),
    ("map", "heap"),
    ("list", "heap"),
    ("value", "rocksdb"),
    ("map", "rocksdb"),
    ("list", "rocksdb"),
    ("value", "columns"),
    ("map", "columns"),
]


@pytest.fixture
def eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_no_lookup_sees_what_is_not_of_the_version_it_names(
    kind: str, backend: str, tmp_path: Path, eager_threads: None
) -> None:
    # So little memory that rows in RocksDB are flushed and forgotten all the time.
    written = Written(kind, backend, tmp_path, memory_bytes=200_000)
    over = threading.Event()
    wrong: list[Any] = []
    counts = {"answered": 0, "moved on": 0}

    def ask(seed: int) -> None:
        at = seed
        while not over.is_set() and not wrong:
            at = (at * 31 + 7) % PAIRS
            version, number = written.committed
            try:
                found = written.look_up(version, [2 * at, 2 * at + 1])
            except Exception as error:
                wrong.append(error)
                return
            if found is None:
                counts["moved on"] += 1
                continue
            counts["answered"] += 1
            expected = written.expected(number, 60, at)
            if found != [expected, expected]:
                wrong.append((number, at, found, expected))

    asking = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2, 3)]
    for thread in asking:
        thread.start()
    writing: threading.Thread | None = None
    try:
        for number in range(1, EPOCHS + 1):
            if writing is not None:
                writing.join()
            written.begin()
            writing = threading.Thread(target=write_base, args=(written, number, tmp_path))
            if number % 3 == 0:
                # An attempt that comes to nothing.
                written.write(-number, touched(number, 80))
                if number % 2:
                    written.finish(-number)
                written.begin()
            if number % 4 == 1:
                writing.start()
            else:
                writing = None
            for pair in touched(number, 60):
                written.write(number, range(pair, pair + 1))
            written.finish(number)
            written.commit(number)
    finally:
        over.set()
        for thread in asking:
            thread.join()
        if writing is not None:
            writing.join()
    assert not wrong, wrong[0]
    assert counts["answered"] > 50
    version, number = written.committed
    for pair in range(PAIRS):
        assert written.look_up(version, [2 * pair]) == [written.expected(number, 60, pair)]


def write_base(written: Written, number: int, scratch: Path) -> None:
    """In the background, as a slot does it."""
    base = written.holding.backend.begin_base(written.holding.tables, range(GROUP_COUNT))
    target = BaseTarget(open_store("memory:"), 1, "op", number, str(scratch), 1 << 10)
    try:
        base.write(target, lambda: None)
    except BaseCancelledError:
        pass
    finally:
        base.close()


@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_a_finished_epoch_is_there_beside_the_one_before(
    kind: str, backend: str, tmp_path: Path
) -> None:
    written = Written(kind, backend, tmp_path)
    versions = [written.committed[0]]
    for number in (1, 2, 3):
        written.begin()
        written.write(number, range(2))
        before = written.look_up(versions[-1], [0, 1, 2, 3, 4])
        written.finish(number)
        assert written.look_up(versions[-1], [0, 1, 2, 3, 4]) == before
        written.commit(number)
        versions.append(written.committed[0])
        expected = {"value": number, "list": list(range(1, number + 1))}
        expected["map"] = {0: number, **{n: n for n in range(1, number + 1)}}
        assert written.look_up(versions[-1], [0, 3, 4]) == [expected[kind], expected[kind], None]
        for old in versions[:-2]:
            assert written.look_up(old, [0]) is None


@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_state_that_was_handed_on_is_found_at_its_new_place_only(
    kind: str, backend: str, tmp_path: Path
) -> None:
    written = Written(kind, backend, tmp_path / "a")
    written.write(1, range(2))
    written.finish(1)
    written.commit(1)
    heir = Written(kind, backend, tmp_path / "b")
    assert heir.holding.adopt(written.holding)
    heir.table = heir.holding.tables["s"]
    version, _ = written.committed
    assert written.look_up(version, [0]) is None
    found = heir.look_up(version, [0])
    assert found is not None and found[0] is not None


def test_what_is_not_all_there_answers_nothing(tmp_path: Path) -> None:
    written = Written("value", "heap", tmp_path)
    written.write(1, range(2))
    written.finish(1)
    written.commit(1)
    version, _ = written.committed
    form = form_of(written.declaration)
    places = [(group_of(0), packing_of(written.table).key(0))]
    assert written.holding.look_up("t", version, form, places) is None
    other = ("value", "string", "", "")
    assert written.holding.look_up("s", version, other, places) is None
    assert written.holding.look_up("s", INCOMPLETE, form, places) is None
    # Half of the key groups go; what is left has a version that nobody names, until it has one.
    half = range(GROUP_COUNT // 2)
    pieces = [Piece(0, GROUP_COUNT, version)]
    assert written.holding.bring_to("rescaled", half, pieces) == []
    assert written.holding.look_up("s", "rescaled", form, places) is None
    written.holding.version = "rescaled"
    in_half = [key for key in (0, 1, 2, 3) if group_of(key) in half]
    gone = [key for key in (0, 1, 2, 3) if group_of(key) not in half]
    assert written.look_up("rescaled", in_half) == [1] * len(in_half)
    if gone:
        assert written.look_up("rescaled", gone) is None
    written.holding.close()
    assert written.look_up("rescaled", in_half) is None


@pytest.mark.parametrize(("backend", "is_answered"), [("heap", True), ("rocksdb", False)])
def test_timers_in_a_database_are_looked_up_in_the_checkpoint(
    backend: str, is_answered: bool, tmp_path: Path
) -> None:
    # A slot would read all timers of the key group for it, and no epoch could begin meanwhile.
    made = make_backend(backend, str(tmp_path / "db"), 1 << 20)
    holding = Holding("op", pa.int64(), made, group_count=GROUP_COUNT)
    holding.declare(timer_states())
    holding.bring_to(EMPTY_VERSION, range(GROUP_COUNT), [])
    holding.version = EMPTY_VERSION
    table = holding.tables[EVENT_TIMERS]
    places = [(group_of(0), packing_of(table).key(0))]
    found = holding.look_up(EVENT_TIMERS, EMPTY_VERSION, form_of(table.declaration), places)
    assert found == (([None], None) if is_answered else None)
    holding.close()


def test_a_lookup_does_not_wait_for_ever_while_rows_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.slot.holding.LOOK_UP_S", 0.01)
    written = Written("value", "heap", tmp_path)
    with written.holding.lock:
        assert written.look_up(EMPTY_VERSION, [0]) is None
    assert written.look_up(EMPTY_VERSION, [0]) == [None]


def test_looking_up_leaves_no_trace_in_what_rocksdb_remembers(tmp_path: Path) -> None:
    for kind in ("value", "map", "list"):
        written = Written(kind, "rocksdb", tmp_path / kind)
        written.write(1, range(50))
        written.finish(1)
        written.commit(1)
        written.begin()
        backend: Any = written.holding.backend
        backend.flush()
        for rows in backend.all_rows():
            rows.rotate()
            rows.rotate()
        cached = backend.cached_bytes
        found = written.look_up(written.committed[0], list(range(100)))
        assert found is not None and None not in found
        assert backend.cached_bytes == cached
        assert all(not dict.__len__(rows) and not rows.old for rows in backend.all_rows())


@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_a_large_lookup_lets_epochs_begin_between_its_pieces(
    kind: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_holding, "PIECE_KEYS", 30)
    monkeypatch.setattr("cairn.backends.columnar.table.CHAINED_AT_ONCE", 100)
    written = Written(kind, backend, tmp_path)
    written.write(1, range(PAIRS))
    written.finish(1)
    written.commit(1)
    version, pieces = written.committed[0], []
    look_up = written.table.look_up

    def watched(places: Any, *, finished: bool) -> Any:
        pieces.append((len(places), finished))
        return look_up(places, finished=finished)

    def pack(packing: Any, held: Any) -> bytes:
        # Not locked: the next epoch begins, which promotes what is being asked for.
        if written.holding.version != version:
            written.begin()
        return pack_held(packing, held)

    monkeypatch.setattr(written.table, "look_up", watched)
    monkeypatch.setattr(slot_holding, "pack_held", pack)
    found = written.look_up(version, list(range(2 * PAIRS)))
    held: dict[str, Any] = {"value": 1, "list": [1], "map": {0: 1, 1: 1}}
    assert found == [held[kind]] * (2 * PAIRS)
    assert max(count for count, _ in pieces) == 30
    assert {finished for _, finished in pieces} == {True, False}


def test_a_lookup_whose_version_goes_half_way_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written("value", "heap", tmp_path)
    written.write(1, range(PAIRS))
    written.finish(1)
    pending = written.holding.pending
    assert pending is not None

    def pack(packing: Any, held: Any) -> bytes:
        written.begin()  # From the parent: the attempt is undone.
        return pack_held(packing, held)

    monkeypatch.setattr(slot_holding, "pack_held", pack)
    assert written.look_up(pending, list(range(100))) is None


def test_a_lookup_stops_when_it_is_too_large_or_nobody_waits_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written("map", "heap", tmp_path)
    written.write(1, range(PAIRS))
    written.finish(1)
    written.commit(1)
    packed = []

    def pack(packing: Any, held: Any) -> bytes:
        packed.append(held)
        return pack_held(packing, held)

    monkeypatch.setattr(slot_holding, "pack_held", pack)
    version = written.committed[0]
    for name, limit in (("REPLY_BYTES_MAX", 10), ("ANSWER_S", 0.0)):
        with monkeypatch.context() as patch:
            patch.setattr(slot_holding, name, limit)
            packed.clear()
            assert written.look_up(version, list(range(2 * PAIRS))) is None
            assert 0 < len(packed) <= 16
    with monkeypatch.context() as patch:
        patch.setattr(slot_holding, "PIECE_BYTES", 1)
        assert len(written.look_up(version, list(range(2 * PAIRS))) or ()) == 2 * PAIRS
