"""State that expires agrees with plain Python, and what is removed when makes no difference.

Two slots run the same epochs: one removes expired state whenever it can, the other never. Both must
show what the model shows, and write the same deltas, byte for byte. Now and then a slot starts
anew from what was written.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn import state
from cairn.backends.handles import make_handle
from cairn.backends.overlay import Table, make_table
from cairn.types.durations import MIN_MS
from tests.backends import ALL, make, take_to_database

GROUPS = 2
TTL_MS = 10

KEYS = st.integers(0, 1)
ENTRIES = st.sampled_from("ab")
VALUES = st.integers(0, 99)
OPS = st.one_of(
    st.tuples(st.just("get")),
    st.tuples(st.just("set"), VALUES),
    st.tuples(st.just("clear")),
    st.tuples(st.just("append"), VALUES),
    st.tuples(st.just("items")),
    st.tuples(st.just("replace"), st.lists(VALUES, max_size=3)),
    st.tuples(st.just("drop")),
    st.tuples(st.just("put"), ENTRIES, st.none() | VALUES),
    st.tuples(st.just("look"), ENTRIES),
    st.tuples(st.just("has"), ENTRIES),
    st.tuples(st.just("delete"), ENTRIES),
    st.tuples(st.just("entries")),
    st.tuples(st.just("empty")),
)
ROWS = st.lists(st.tuples(KEYS, st.integers(0, 12), OPS), max_size=8)
EPOCHS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 3, 5, 12]),
        ROWS,
        st.sampled_from(["commit", "commit", "store", "rollback", "restart"]),
    ),
    max_size=8,
)


@dataclass
class Scope:
    key: Any = None
    group: int = 0
    now_ms: int = 0
    event_time_ms: int | None = None
    floor_ms: int = MIN_MS


def declared(ttl: state.TTL) -> dict[str, state.Declaration]:
    found: dict[str, state.Declaration] = {
        "value": state.Value("long", ttl=ttl),
        "items": state.List("long", ttl=ttl),
        "entries": state.Map("string", "long", ttl=ttl),
    }
    for name, declaration in found.items():
        declaration.name = name
    return found


class Slot:
    def __init__(self, kind: str, folder: str, ttl: state.TTL, *, removes: bool) -> None:
        self.removes = removes
        self.scope = Scope()
        self.backend = make(kind, tempfile.mkdtemp(dir=folder), 64 << 20)
        self.tables: dict[str, Table] = {}
        self.handles: dict[str, Any] = {}
        for name, declaration in declared(ttl).items():
            table = make_table(declaration, pa.int64(), self.backend, GROUPS)
            table.assign(range(GROUPS))
            self.tables[name] = table
            self.handles[name] = make_handle(table, self.scope)

    def begin(self, floor_ms: int) -> None:
        self.scope.now_ms = self.scope.floor_ms = floor_ms
        for table in self.tables.values():
            assert table.expiry is not None
            table.expiry.begin(floor_ms)
        self.reclaim()

    def reclaim(self) -> None:
        for table in self.tables.values():
            if self.removes:
                assert table.expiry is not None
                table.expiry.reclaim(10.0)
        if self.removes:
            self.backend.repack(list(self.tables.values()))

    def run(self, key: int, at: int, op: tuple[Any, ...]) -> Any:
        self.scope.key, self.scope.group, self.scope.event_time_ms = key, key % GROUPS, at
        value, items, entries = (self.handles[name] for name in ("value", "items", "entries"))
        name, *given = op
        if name == "delete":
            return given[0] in entries and entries.pop(given[0])
        calls: dict[str, Any] = {
            "get": value.get,
            "set": value.set,
            "clear": value.clear,
            "append": items.append,
            "items": lambda: (list(items), len(items)),
            "replace": items.set,
            "drop": items.clear,
            "put": entries.__setitem__,
            "look": entries.get,
            "has": entries.__contains__,
            "entries": lambda: (list(entries), len(entries), dict(entries)),
            "empty": entries.clear,
        }
        return calls[name](*given)

    def deltas(self) -> dict[str, Any]:
        return {name: table.delta() for name, table in self.tables.items()}

    def end(self, *, commit: bool) -> None:
        self.reclaim()
        for table in self.tables.values():
            table.promote() if commit else table.rollback()


class Model:
    """Values with the time of their last write; nothing is ever removed because of its age."""

    def __init__(self, ttl: state.TTL) -> None:
        self.ttl = ttl
        self.value: dict[int, tuple[int, Any]] = {}
        self.items: dict[int, list[tuple[int, Any]]] = {}
        self.entries: dict[int, dict[str, tuple[int, Any]]] = {}
        self.floor_ms = 0

    def copy(self) -> Model:
        twin = Model(self.ttl)
        twin.value = dict(self.value)
        twin.items = {key: list(items) for key, items in self.items.items()}
        twin.entries = {key: dict(entries) for key, entries in self.entries.items()}
        return twin

    def run(self, key: int, at: int, op: tuple[Any, ...]) -> Any:
        clock = max(at, self.floor_ms) if self.ttl.clock == "event" else self.floor_ms
        return getattr(self, "do_" + op[0])(key, clock, *op[1:])

    def _lives(self, at: int, clock: int) -> bool:
        return at + TTL_MS > clock

    def _read(self, pair: tuple[int, Any], clock: int) -> tuple[int, Any]:
        return (max(pair[0], clock), pair[1]) if self.ttl.refresh == "read-write" else pair

    def do_get(self, key: int, clock: int) -> Any:
        pair = self.value.get(key)
        if pair is None or not self._lives(pair[0], clock):
            return None
        self.value[key] = self._read(pair, clock)
        return pair[1]

    def do_set(self, key: int, clock: int, value: Any) -> None:
        before = self.value.get(key, (clock, None))[0]
        self.value[key] = (max(clock, before), value)

    def do_clear(self, key: int, clock: int) -> None:
        self.value.pop(key, None)

    def do_append(self, key: int, clock: int, value: Any) -> None:
        self.items.setdefault(key, []).append((clock, value))

    def do_items(self, key: int, clock: int) -> Any:
        items = self.items.get(key, [])
        seen = [value for at, value in items if self._lives(at, clock)]
        self.items[key] = [
            self._read(pair, clock) if self._lives(pair[0], clock) else pair for pair in items
        ]
        return seen, len(seen)

    def do_replace(self, key: int, clock: int, values: list[Any]) -> None:
        self.items[key] = [(clock, value) for value in values]

    def do_drop(self, key: int, clock: int) -> None:
        self.items.pop(key, None)

    def do_put(self, key: int, clock: int, entry: str, value: Any) -> None:
        entries = self.entries.setdefault(key, {})
        entries[entry] = (max(clock, entries.get(entry, (clock, None))[0]), value)

    def do_look(self, key: int, clock: int, entry: str) -> Any:
        pair = self.entries.get(key, {}).get(entry)
        if pair is None or not self._lives(pair[0], clock):
            return None
        self.entries[key][entry] = self._read(pair, clock)
        return pair[1]

    def do_has(self, key: int, clock: int, entry: str) -> bool:
        pair = self.entries.get(key, {}).get(entry)
        return pair is not None and self._lives(pair[0], clock)

    def do_delete(self, key: int, clock: int, entry: str) -> Any:
        if not self.do_has(key, clock, entry):
            return False
        return self.entries[key].pop(entry)[1]

    def do_entries(self, key: int, clock: int) -> Any:
        names = sorted(e for e in "ab" if self.do_has(key, clock, e))
        return names, len(names), {e: self.do_look(key, clock, e) for e in names}

    def do_empty(self, key: int, clock: int) -> None:
        self.entries.pop(key, None)


@pytest.mark.parametrize("clock", ["processing", "event"])
@pytest.mark.parametrize("refresh", ["write", "read-write"])
@pytest.mark.parametrize("kind", ALL)
@settings(suppress_health_check=list(HealthCheck))
@given(epochs=EPOCHS)
def test_slots_that_remove_and_slots_that_do_not_agree_with_the_model(
    kind: str, refresh: Any, clock: Any, epochs: list[Any]
) -> None:
    ttl = state.TTL(f"{TTL_MS} ms", clock=clock, refresh=refresh)
    with tempfile.TemporaryDirectory() as folder:
        slots = [Slot(kind, folder, ttl, removes=removes) for removes in (True, False)]
        model = Model(ttl)
        history: list[dict[str, Any]] = []
        floor_ms = 0
        for step_ms, rows, end in epochs:
            floor_ms += step_ms
            for slot in slots:
                slot.begin(floor_ms)
            attempt = model.copy()
            attempt.floor_ms = floor_ms
            for key, after_ms, op in sorted(rows, key=lambda row: row[1]):
                found = [slot.run(key, floor_ms + after_ms, op) for slot in slots]
                expected = attempt.run(key, floor_ms + after_ms, op)
                assert found == [expected, expected], (key, floor_ms + after_ms, op)
            deltas = [slot.deltas() for slot in slots]
            assert deltas[0] == deltas[1]
            for slot in slots:
                slot.end(commit=end != "rollback")
            if end != "rollback":
                model = attempt
                history.append(deltas[0])
            if end == "store":
                for slot in slots:
                    take_to_database(slot.backend, range(GROUPS))
            if end == "restart":
                slots[0].backend.close()
                slots[0] = restored(kind, folder, ttl, history, floor_ms)
        for slot in slots:
            slot.backend.close()


def restored(
    kind: str, folder: str, ttl: state.TTL, history: list[dict[str, Any]], floor_ms: int
) -> Slot:
    """A slot that knows no more than what was written."""
    slot = Slot(kind, folder, ttl, removes=True)
    for deltas in history:
        for name, batch in deltas.items():
            if batch is not None:
                table = slot.tables[name]
                table.apply(table.leave_out_expired(batch, floor_ms, keep_rows=True))
    return slot
