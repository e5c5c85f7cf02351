"""State by the batch agrees with a dict: through epochs, failures, merges, bases and restores.

One machine, over state in arrays on every backend, and over state that does not fit in memory. What
it reads must not depend on how the state came to be, so after each epoch a table that was restored
is asked too.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn import state
from cairn.backends.columnar import table as columns
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.backends.overlay import in_order
from cairn.key_groups import key_groups
from cairn.storage.files import encode_segment
from cairn.types import parse_type
from cairn.types.codec import codec
from tests.backends import OUTSIDE, make, write_base

GROUP_COUNT = 8
NONE = st.none()
KEY_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "bigint": st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5),
    "int": st.integers(0, 5),
    "boolean": st.booleans(),
    "date": st.dates(),
    "double": st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")]),
    "decimal(12,3)": st.decimals(-999_999_999, 999_999_999, places=3),
    "string": st.sampled_from(["", "a", "b", "é\0"]),
    "binary": st.binary(max_size=2),
    "array<bigint>": st.lists(NONE | st.integers(0, 2), max_size=2),
    "struct<a:bigint,b:string>": st.fixed_dictionaries(
        {"a": NONE | st.integers(0, 2), "b": NONE | st.sampled_from(["x", "y"])}
    ),
    "struct<a:int,b:date,c:double>": st.fixed_dictionaries(
        {
            "a": NONE | st.integers(0, 2),
            "b": NONE | st.dates(),
            "c": st.sampled_from([0.0, -0.0, float("nan")]),
        }
    ),
}
VALUE_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "boolean": st.booleans(),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "timestamp": st.datetimes().map(lambda time: time.replace(tzinfo=dt.UTC, fold=0)),
    "binary": st.binary(max_size=20),
    "array<int>": st.lists(NONE | st.integers(0, 9), max_size=3),
    "decimal(12,3)": st.decimals(-999_999_999, 999_999_999, places=3),
    "string": st.text(max_size=4),
    "map<string,double>": st.dictionaries(st.text(max_size=2), st.none() | st.just(1.0)),
    "struct<n:bigint,s:struct<x:double,t:string NOT NULL>>": st.fixed_dictionaries(
        {
            "n": NONE | st.integers(0, 9),
            "s": NONE | st.fixed_dictionaries({"x": NONE | st.just(0.5), "t": st.just("t")}),
        }
    ),
}
ENTRY_TYPES = {name: KEY_TYPES[name] for name in ("bigint", "string", "date", "double")}


class Subject:
    """A table with its handle, and the way through files."""

    def __init__(self, declaration: state.Declaration, key_type: Any, backend: str) -> None:
        self.declaration = declaration
        self.key_type = key_type
        self.backend_name = backend
        self.folder = tempfile.TemporaryDirectory()
        name, memory_bytes = KINDS[backend]
        self.backend = make(name, self.folder.name + "/state", memory_bytes)
        self.table = make_batch_table(declaration, key_type, self.backend, GROUP_COUNT)
        self.table.assign(range(GROUP_COUNT))
        self.handle: Any = make_batch_handle(self.table)
        self.deltas: list[pa.RecordBatch] = []
        self.base: list[pa.RecordBatch] = []

    def commit(self) -> None:
        delta = self.table.delta()
        assert (self.table.keys_changed() == 0) == (delta is None)
        if delta is not None:
            assert delta.schema == self.table.layout.schema
            delta.validate(full=True)
            self.deltas.append(delta)
        self.table.promote()
        if self.backend_name in OUTSIDE:
            write_base(self.backend, groups=range(GROUP_COUNT))
            self.table.promote()

    def restored(self, backend: str | None = None) -> Subject:
        fresh = Subject(self.declaration, self.key_type, backend or self.backend_name)
        for batch in [*self.base, *self.deltas]:
            fresh.table.apply(batch)
        fresh.base, fresh.deltas = list(self.base), list(self.deltas)
        return fresh

    def merge(self) -> None:
        if len(self.deltas) > 1:
            self.deltas = [self.table.merge(self.deltas)]

    def begin_base(self) -> Iterator[pa.RecordBatch]:
        """What a base begun now will be written from."""
        return self.table.freeze() or iter(list(self.table.dump()))

    def close(self) -> None:
        self.backend.close()
        self.folder.cleanup()


def encoded(type_: Any, values: list[Any]) -> pa.Array:
    own = codec(type_)
    return own.encode([None if value is None else own.normalise(value) for value in values])


def dict_keys(type_: Any, values: list[Any]) -> list[Any]:
    own = codec(type_)
    return [None if value is None else own.normalise_key(value) for value in values]


def stored(type_: Any, value: Any) -> Any:
    return None if value is None else codec(type_).normalise(value)


def digest_of(subject: Subject) -> str | None:
    """What names the delta of the running epoch."""
    delta = subject.table.delta()
    return delta and encode_segment("delta", "op", {"s": delta}).id


def look_up(subject: Subject, model: dict[Any, Any], keys: list[Any], *, is_map: bool) -> None:
    """A lookup on another thread finds what the epoch has."""
    table = subject.table
    groups = key_groups(table.keys.encode(keys), table.keys.arrow, GROUP_COUNT).tolist()
    expected = [model.get(key) for key in keys]
    if is_map:
        by_key: dict[Any, dict[Any, Any]] = {}
        for (key, entry), value in model.items():
            by_key.setdefault(key, {})[entry] = value
        expected = [by_key.get(key) for key in keys]
    assert table.look_up(list(zip(groups, keys, strict=True)), finished=True) == expected


# --- the machine --------------------------------------------------------------------------------

STEPS = st.sampled_from(["commit", "commit", "rollback", "restore", "move", "merge", "base", "cut"])


@st.composite
def scripts(draw: st.DrawFn, *, is_map: bool) -> tuple[str, str, str, list[Any]]:
    key_type = draw(st.sampled_from(sorted(KEY_TYPES)))
    value_type = draw(st.sampled_from(sorted(VALUE_TYPES)))
    entry_type = draw(st.sampled_from(sorted(ENTRY_TYPES)))
    parts = [NONE | KEY_TYPES[key_type], NONE | VALUE_TYPES[value_type]]
    if is_map:
        parts.insert(1, ENTRY_TYPES[entry_type])
    puts = st.lists(st.tuples(*parts), min_size=1, max_size=6)
    steps = draw(st.lists(puts | STEPS, min_size=1, max_size=14))
    return key_type, entry_type, value_type, steps


def play(subject: Subject, steps: list[Any], check: Any, put: Any) -> None:
    """Run a script; `check(subject, model)` after each step, `put(subject, model, rows)`."""
    model: dict[Any, Any] = {}
    committed: dict[Any, Any] = {}
    puts: list[Any] = []
    base: Iterator[pa.RecordBatch] | None = None
    based: dict[Any, Any] = {}
    base_at = 0
    opened = [subject]
    try:
        for step in [*steps, "commit", "restore"]:
            if isinstance(step, list):
                put(subject, model, step)
                puts.append(step)
            elif step == "rollback":
                subject.table.rollback()
                model = dict(committed)
                puts = []
            else:
                if puts:
                    # A slot that has just restored makes the same delta of the same rows.
                    opened.append(twin := subject.restored())
                    for rows in puts:
                        put(twin, {}, rows)
                    assert digest_of(subject) == digest_of(twin)
                    puts = []
                subject.commit()
                committed = dict(model)
            if step == "merge":
                base = None
                subject.merge()
            elif step == "base":
                base, based, base_at = subject.begin_base(), dict(committed), len(subject.deltas)
            elif step == "restore" and base is not None:
                # The base holds what was there when it began, whatever came after.
                subject.base, later = list(base), subject.deltas[base_at:]
                subject.deltas, base = [], None
                opened.append(alone := subject.restored())
                check(alone, based)
                subject.deltas = later
            if step == "restore":
                opened.append(subject := subject.restored())
            elif step == "move":
                # Stored rows do not tell whether they come from arrays.
                others = [*KINDS, *KINDS]
                other = others[others.index(subject.backend_name) + 1]
                base = None
                opened.append(subject := subject.restored(other))
            elif step == "cut":
                # Half of the key groups go away and come back from files.
                base = None
                gone = range(GROUP_COUNT // 2)
                subject.table.assign(range(GROUP_COUNT // 2, GROUP_COUNT))
                subject.table.assign(range(GROUP_COUNT))
                for batch in [*subject.base, *subject.deltas]:
                    groups = batch["group"].to_numpy()
                    subject.table.apply(batch.filter(pa.array(groups < gone.stop)))
            check(subject, model)
            assert subject.table.count_held().entries == len(model)
    finally:
        for one in opened:
            one.close()


KINDS = {
    "heap": ("heap", 0),
    "rocksdb": ("rocksdb", 64 << 20),
    "spilled": ("rocksdb", 400),
    "postgres": ("postgres", 400),
    "redis": ("redis", 400),
    "sqlite": ("sqlite", 400),
}
"""Backend and memory."""
LIMITS = settings(suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def lay_out_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "DEAD_MIN", 1)
    monkeypatch.setattr(columns, "PIECE_ROWS", 2)


@pytest.mark.parametrize("backend", KINDS)
@LIMITS
@given(script=scripts(is_map=False))
def test_values_by_the_batch_agree_with_a_dict(backend: str, script: Any) -> None:
    key_type, _, value_type, steps = script
    keys_are, values_are = parse_type(key_type), parse_type(value_type)
    declaration: state.Value[Any] = state.Value(value_type)
    declaration.name = "s"
    seen: dict[Any, Any] = {}

    def put(subject: Subject, model: dict[Any, Any], rows: list[Any]) -> None:
        keys = encoded(keys_are, [key for key, _ in rows])
        subject.handle.get_many(keys)
        subject.handle.put_many(keys, encoded(values_are, [value for _, value in rows]))
        for key, (given_key, value) in zip(
            dict_keys(keys_are, [key for key, _ in rows]), rows, strict=True
        ):
            seen[key] = given_key
            model.pop(key, None)
            if value is not None:
                model[key] = stored(values_are, value)

    def check(subject: Subject, model: dict[Any, Any]) -> None:
        asked = list(seen)
        keys = encoded(keys_are, [seen[key] for key in asked])
        found = subject.handle.get_many(keys)
        assert found.type == values_are
        assert codec(values_are).decode(found) == [model.get(key) for key in asked]
        look_up(subject, model, asked, is_map=False)

    play(Subject(declaration, keys_are, backend), steps, check, put)


@pytest.mark.parametrize("backend", KINDS)
@LIMITS
@given(script=scripts(is_map=True), is_ranged=st.booleans())
def test_maps_by_the_batch_agree_with_a_dict(backend: str, script: Any, is_ranged: bool) -> None:
    key_type, entry_type, value_type, steps = script
    keys_are, values_are = parse_type(key_type), parse_type(value_type)
    entries_are = parse_type(entry_type)
    declaration: state.Map[Any, Any] = state.Map(entry_type, value_type)
    declaration.name = "s"
    seen: dict[Any, Any] = {}

    def put(subject: Subject, model: dict[Any, Any], rows: list[Any]) -> None:
        keys = encoded(keys_are, [row[0] for row in rows])
        entries = encoded(entries_are, [row[1] for row in rows])
        subject.handle.put_many(keys, entries, encoded(values_are, [row[2] for row in rows]))
        names = zip(
            dict_keys(keys_are, [row[0] for row in rows]),
            dict_keys(entries_are, [row[1] for row in rows]),
            strict=True,
        )
        for name, row in zip(names, rows, strict=True):
            seen[name] = row[:2]
            model.pop(name, None)
            if row[2] is not None:
                model[name] = stored(values_are, row[2])

    def check(subject: Subject, model: dict[Any, Any]) -> None:
        handle = subject.handle
        asked = list(seen)
        found = handle.get_many(
            encoded(keys_are, [seen[name][0] for name in asked]),
            encoded(entries_are, [seen[name][1] for name in asked]),
        )
        assert codec(values_are).decode(found) == [model.get(name) for name in asked]
        owners = list({name[0]: seen[name][0] for name in asked}.items())
        rows, entries, values = handle.of_keys(encoded(keys_are, [given for _, given in owners]))
        expected = [
            (at, entry, model[key, entry])
            for at, (key, _) in enumerate(owners)
            for entry in in_order([e for k, e in model if (k,) == (key,)])
        ]
        entry_names = codec(entries_are).decode_keys(entries)
        decoded = codec(values_are).decode(values)
        found_entries = list(zip(rows.to_pylist(), entry_names, decoded, strict=True))
        assert repr(found_entries) == repr(expected)
        look_up(subject, model, [key for key, _ in owners], is_map=True)
        if not is_ranged:
            return
        bounds = [name[1] for name in asked[:2] if name[1] == name[1]]
        for low, high in [(None, None), *((b, None) for b in bounds), *((None, b) for b in bounds)]:
            keys, entries, values = handle.between(low, high)
            names = list(
                zip(
                    codec(keys_are).decode_keys(keys),
                    codec(entries_are).decode_keys(entries),
                    strict=True,
                )
            )
            inside = [
                name
                for name in model
                if (low is None or name[1] > low) and (high is None or name[1] <= high)
            ]
            ordered = [(key, entry) for entry, key in in_order([(e, k) for k, e in inside])]
            assert repr(names) == repr(ordered)
            assert codec(values_are).decode(values) == [model[name] for name in names]
        if entry_type == "bigint":
            for low in [None, *bounds]:
                above = [entry for _, entry in model if low is None or entry > low]
                assert handle.entry_above(low) == min(above, default=None)

    play(Subject(declaration, keys_are, backend), steps, check, put)
