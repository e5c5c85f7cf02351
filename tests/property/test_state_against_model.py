"""Every kind of state agrees with plain Python, through epochs, failures, restores and rescales.

Two machines. The first drives tables and handles alone, over every type: it commits, rolls
back, merges deltas, writes bases and restores. The second drives whole jobs, with a real
coordinator and real slots: rows are commands to the state, attempts fail, slots die, files
are compacted and the parallelism changes.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import operator
import os
import pickle
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn import KeyedProcess, state
from cairn.backends import BACKENDS, Backend
from cairn.backends.handles import make_handle
from cairn.backends.overlay import Table, make_table
from cairn.driver.coordinator import compaction, epoch
from cairn.driver.coordinator.epoch import Coordinator
from cairn.errors import FunctionError
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Graph, Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.sinks import Collect
from cairn.sinks.base import SinkContext
from cairn.storage import manifest
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import SparkPosition
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from cairn.testing import ManualClock
from cairn.types import parse_schema, parse_type
from cairn.types.codec import codec
from tests.backends import OUTSIDE, backend_name, make, take_to_database
from tests.marks import for_soak
from tests.simulation.cluster import Cluster, Trouble
from tests.simulation.world import stored_state

GROUP_COUNT = 8
KEYS = st.integers(0, 3)

# --- values of every type, as users hand them in ----------------------------------------------

_LONGS = st.integers(-(2**63), 2**63 - 1)
_DOUBLES = st.floats()
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
# Arrow has no `fold`, and it makes no difference to equality.
_TIMES = st.datetimes().map(lambda time: time.replace(fold=0))
TYPES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": _LONGS,
    "float": st.floats(width=32),
    "double": _DOUBLES,
    "decimal(12,3)": st.decimals(-999_999_999, 999_999_999, places=3),
    "string": _TEXTS,
    "binary": st.binary(max_size=6),
    "date": st.dates(),
    "timestamp": _TIMES.map(lambda time: time.replace(tzinfo=dt.UTC)),
    "timestamp_ntz": _TIMES,
    "interval day to second": st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999)),
    "array<bigint>": st.lists(st.none() | _LONGS, max_size=3),
    "map<string,double>": st.dictionaries(_TEXTS, st.none() | _DOUBLES, max_size=3),
    "struct<a:bigint,b:struct<c:string,d:array<double>>>": st.fixed_dictionaries(
        {
            "a": st.none() | _LONGS,
            "b": st.none()
            | st.fixed_dictionaries({"c": _TEXTS, "d": st.lists(_DOUBLES, max_size=2)}),
        }
    ),
    "object": st.recursive(
        st.none() | st.integers() | _TEXTS,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=2),
        max_leaves=4,
    ).filter(lambda value: value is not None),
}
ENTRY_TYPES = {name: TYPES[name] for name in ("string", "bigint", "double", "date")}


class Mean:
    def create(self) -> Any:
        return (0, 0)

    def add(self, accumulator: Any, value: int) -> Any:
        return (accumulator[0] + 1, accumulator[1] + value)

    def merge(self, left: Any, right: Any) -> Any:
        return (left[0] + right[0], left[1] + right[1])

    def result(self, accumulator: Any) -> float:
        return float(accumulator[1] / accumulator[0])


# --- the model: one key's state in plain Python -----------------------------------------------


class Model:
    """The state of one key: `do` a command, then `seen` what a function would read."""

    def __init__(self, type_: str, entry_type: str) -> None:
        self._values = codec(parse_type(type_))
        self._entries = codec(parse_type(entry_type))
        self.value: Any = None
        self.items: list[Any] = []
        self.entries: dict[Any, Any] = {}
        self.total: int | None = None
        self.mean: tuple[int, int] | None = None

    def _kept(self, value: Any) -> Any:
        return self._values.restore(self._values.normalise(value))

    def do(self, op: str, *args: Any) -> None:
        if op == "value.set":
            self.value = self._kept(args[0])
        elif op == "value.clear":
            self.value = None
        elif op == "list.append":
            self.items.append(self._kept(args[0]))
        elif op == "list.extend":
            self.items += map(self._kept, args[0])
        elif op == "list.set":
            self.items = list(map(self._kept, args[0]))
        elif op == "list.clear":
            self.items = []
        elif op == "map.put":
            value = None if args[1] is None else self._kept(args[1])
            self.entries[self._entries.normalise_key(args[0])] = value
        elif op == "map.pop":
            self.entries.pop(self._entries.normalise_key(args[0]), None)
        elif op == "map.clear":
            self.entries = {}
        elif op == "total.add":
            self.total = args[0] + (self.total or 0)
        elif op == "total.clear":
            self.total = None
        elif op == "mean.add":
            count, total = self.mean or (0, 0)
            self.mean = (count + 1, total + args[0])
        elif op == "mean.clear":
            self.mean = None

    def seen(self) -> str:
        entries = sorted(self.entries.items(), key=_by_entry)
        mean = None if self.mean is None else self.mean[1] / self.mean[0]
        return repr((self.value, self.items, len(self.items), entries, self.total, mean))

    def stored(self) -> dict[str, Any]:
        """What the tables hold of this key, by state; what is empty is not there."""
        held = {
            "value": self.value,
            "items": self.items or None,
            "entries": self.entries or None,
            "total": self.total,
            "mean": self.mean,
        }
        return {name: value for name, value in held.items() if value is not None}


def _by_entry(pair: tuple[Any, Any]) -> Any:
    entry = pair[0]
    return (1, 0) if isinstance(entry, float) and math.isnan(entry) else (0, entry)


def declared(type_: str, entry_type: str) -> dict[str, state.Declaration]:
    return {
        "value": state.Value(type_),
        "items": state.List(type_),
        "entries": state.Map(entry_type, type_),
        "total": state.Reducing("bigint", operator.add),
        "mean": state.Aggregating("struct<n:bigint,s:bigint>", Mean()),
    }


def do(function: Any, op: str, *args: Any) -> None:
    """The command, on the handles of a function."""
    kind, _, action = op.partition(".")
    if kind == "value":
        function.value.clear() if action == "clear" else function.value.set(*args)
    elif kind == "list":
        getattr(function.items, action)(*args)
    elif op == "map.put":
        function.entries[args[0]] = args[1]
    elif op == "map.pop":
        function.entries.pop(args[0], None)
    elif op == "map.clear":
        function.entries.clear()
    elif kind in ("total", "mean"):
        getattr(getattr(function, kind), action)(*args)


def seen(function: Any) -> str:
    return repr(
        (
            function.value.get(),
            list(function.items),
            len(function.items),
            list(function.entries.items()),
            function.total.get(),
            function.mean.get(),
        )
    )


def commands(type_: str, entry_type: str) -> st.SearchStrategy[tuple[Any, ...]]:
    values, entries, small = TYPES[type_], TYPES[entry_type], st.integers(-1000, 1000)
    return st.one_of(
        st.tuples(st.just("value.set"), values),
        st.tuples(st.just("value.clear")),
        st.tuples(st.just("list.append"), values),
        st.tuples(st.just("list.extend"), st.lists(values, max_size=3)),
        st.tuples(st.just("list.set"), st.lists(values, max_size=2)),
        st.tuples(st.just("list.clear")),
        st.tuples(st.just("map.put"), entries, st.none() | values),
        st.tuples(st.just("map.pop"), entries),
        st.tuples(st.just("map.clear")),
        st.tuples(st.just("total.add"), small),
        st.tuples(st.just("total.clear")),
        st.tuples(st.just("mean.add"), small),
        st.tuples(st.just("mean.clear")),
        st.tuples(st.just("read")),
    )


# --- tables and handles alone -----------------------------------------------------------------


class Scope:
    key: Any = None
    group = 0


class Tables:
    """One key group of a function's state, and every file written of it."""

    def __init__(
        self, declarations: dict[str, state.Declaration], backend: str, scratch: str
    ) -> None:
        self.declarations = declarations
        self.backend: Backend | None = None
        self.make = partial(make, backend, os.path.join(scratch, "state"), 64 << 20)
        for name, declaration in declarations.items():
            declaration.name = name
        self.scope = Scope()
        self.files: dict[str, list[pa.RecordBatch]] = {name: [] for name in declarations}
        self.tables: dict[str, Table] = {}
        self.start()

    def start(self) -> None:
        """A new slot: what the files hold, and nothing else."""
        self.close()
        self.backend = self.make()
        for name, declaration in self.declarations.items():
            table = make_table(declaration, pa.int64(), self.backend, 1)
            table.assign(range(1))
            for batch in self.files[name]:
                table.apply(batch)
            self.tables[name] = table
            setattr(self, name, make_handle(table, self.scope))

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()

    def flush(self) -> None:
        """Out of memory, where the backend has another place."""
        assert self.backend is not None
        take_to_database(self.backend, range(1))

    def prefetch(self) -> None:
        assert self.backend is not None
        self.backend.prefetch([0] * 4, list(range(4)))

    def commit(self) -> None:
        for name, table in self.tables.items():
            delta = table.delta()
            if delta is not None:
                self.files[name].append(delta)
            table.promote()

    def rollback(self) -> None:
        for table in self.tables.values():
            table.rollback()

    def merge(self, count: int) -> None:
        for name, table in self.tables.items():
            last = self.files[name][-count:]
            if len(last) > 1:
                self.files[name][-count:] = [table.merge(last)]

    def rebase(self) -> None:
        """Between epochs: everything as one file."""
        self.rollback()
        for name, table in self.tables.items():
            self.files[name] = list(table.dump())


@pytest.mark.parametrize(
    ("type_", "backend"),
    [
        *((type_, backend) for type_ in TYPES for backend in BACKENDS),
        *(
            (type_, backend) if type_ == "string" else for_soak(type_, backend)
            for type_ in TYPES
            for backend in OUTSIDE
        ),
    ],
)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), entry_type=st.sampled_from(sorted(ENTRY_TYPES)))
def test_state_of_every_type_agrees_with_the_model(
    type_: str, backend: str, entry_type: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tables = Tables(declared(type_, entry_type), backend, scratch)
        try:
            drive(tables, type_, entry_type, data)
        finally:
            tables.close()


def drive(tables: Tables, type_: str, entry_type: str, data: st.DataObject) -> None:
    steps = st.one_of(
        st.tuples(st.just("do"), KEYS, commands(type_, entry_type)),
        st.tuples(st.sampled_from(["commit", "rollback", "start", "rebase"])),
        st.tuples(st.sampled_from(["commit", "flush", "prefetch"])),
        st.tuples(st.just("merge"), st.integers(2, 4)),
    )
    running: dict[int, list[Any]] = {}
    committed: dict[int, list[Any]] = {}

    def model(key: int) -> Model:
        found = Model(type_, entry_type)
        for command in [*committed.get(key, ()), *running.get(key, ())]:
            found.do(*command)
        return found

    for step in data.draw(st.lists(steps, max_size=30)):
        if step[0] == "do":
            _, key, command = step
            tables.scope.key = key
            do(tables, *command)
            running.setdefault(key, []).append(command)
            assert seen(tables) == model(key).seen()
        elif step[0] == "commit":
            tables.commit()
            for key, done in running.items():
                committed.setdefault(key, []).extend(done)
            running = {}
        elif step[0] == "merge":
            tables.merge(step[1])
        elif step[0] in ("flush", "prefetch"):
            getattr(tables, step[0])()
        else:
            getattr(tables, step[0])()
            running = {}
    tables.start()
    for key in committed:
        running = {}
        tables.scope.key = key
        assert seen(tables) == model(key).seen()


# --- whole jobs -------------------------------------------------------------------------------

COMMAND = "seq long, op string, args binary"
SEEN = parse_schema("seq long, seen string")
KEY_COLUMNS: dict[str, tuple[str, st.SearchStrategy[tuple[Any, ...]]]] = {
    "long": ("k long", st.tuples(st.none() | st.integers(0, 5))),
    "double": (
        "k double",
        st.tuples(st.sampled_from([None, 0.0, -0.0, math.nan, math.inf, 1.5, -1.5])),
    ),
    "unicode": (
        "k string",
        st.tuples(st.none() | st.sampled_from(["", "a", "é", "𐍈", "\0", "a "])),
    ),
    "two columns": (
        "k string, `an other` decimal(5,1)",
        st.tuples(
            st.none() | st.sampled_from(["", "x"]),
            st.none() | st.sampled_from([decimal.Decimal("1.0"), decimal.Decimal("-2.5")]),
        ),
    ),
}


def make_function(type_: str, entry_type: str) -> KeyedProcess[Any]:
    def process(self: Any, row: Any, ctx: Any) -> Any:
        if row.op == "raise":
            raise ValueError("as told")
        do(self, row.op, *pickle.loads(row.args))
        yield row.seq, seen(self)

    names: dict[str, Any] = {**declared(type_, entry_type), "process": process}
    return type("Commands", (KeyedProcess,), names)()


class JobMachine:
    """A job whose rows are commands, led by one coordinator after the other."""

    def __init__(
        self, columns: str, type_: str, entry_type: str, backend: str, scratch: str
    ) -> None:
        self.backend = backend
        self.schema = parse_schema(f"{columns}, {COMMAND}")
        self.keys = tuple(name for name in self.schema.names if name not in ("seq", "op", "args"))
        self.function = make_function(type_, entry_type)
        self.scratch = scratch
        self.store = open_store("memory:")
        self.clock = ManualClock()
        self.seen: dict[int, str] = {}
        self.epochs = 0

    def graph(self, sink: Collect) -> Graph:
        return build_graph(
            "commands",
            GROUP_COUNT,
            {
                "rows": SourceNode("rows", None, self.schema, None, None),
                "op": ProcessNode(
                    "op", (Inlet((Port("rows"),), self.keys),), self.function, SEEN, ()
                ),
                "out": SinkNode("out", (Port("op"),), sink),
            },
        )

    def lead(self, parallelism: int, trouble: Trouble) -> None:
        """A new driver takes over, with new slots."""
        self.sink = Collect()
        graph = self.graph(self.sink)
        job = create_or_open_job(self.store, graph.name, GROUP_COUNT)
        spec = job_spec(graph, job_id=job.job_id, checkpoint=self.store.url, backend=self.backend)
        self.sink.open(SinkContext(job.job_id, graph.name, "out", SEEN))
        self.coordinator = Coordinator(
            spec,
            self.store,
            {"out": self.sink},
            parallelism=parallelism,
            retained_epochs=2,
            attempts_max=6,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.cluster = Cluster(graph, spec, self.store, self.scratch, trouble)
        self.coordinator.take_over()
        self.coordinator.recover()

    def run_batch(self, rows: list[tuple[Any, ...]]) -> None:
        row_codec = codec(pa.struct(list(self.schema)))
        array = row_codec.encode([row_codec.normalise(row) for row in rows])
        position = SparkPosition(folder="spark", batch_id=self.epochs, offsets="")
        self.epochs += 1
        self.coordinator.run_batch(
            position, lambda begin: self.cluster.execute({"rows": array}, begin)
        )
        newest = self.coordinator.newest
        assert newest is not None
        self.seen |= dict(self.sink.epochs[newest.number])


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    """So that a few epochs are enough for merges, bases, stored deltas and collection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FAN_IN", 2)
        patch.setattr(compaction, "BASE_BYTES_MIN", 6_000)
        patch.setattr(epoch, "INLINE_BYTES_MAX", 2_500)
        patch.setattr(manifest, "FULL_EVERY", 3)
        yield


@pytest.mark.parametrize(
    ("columns", "backend"),
    [
        *((columns, backend) for columns in KEY_COLUMNS for backend in BACKENDS),
        *((next(iter(KEY_COLUMNS)), backend) for backend in OUTSIDE),
        *(for_soak(columns, each) for columns in list(KEY_COLUMNS)[1:] for each in OUTSIDE),
    ],
)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    type_=st.sampled_from(["bigint", "double", "string", "array<bigint>", "object"]),
    entry_type=st.sampled_from(sorted(ENTRY_TYPES)),
    trouble=st.sampled_from([0.0, 0.03]),
    seed=st.integers(0, 1 << 16),
)
def test_jobs_agree_with_the_model(
    columns: str,
    backend: str,
    data: st.DataObject,
    type_: str,
    entry_type: str,
    trouble: float,
    seed: int,
) -> None:
    ddl, keys = KEY_COLUMNS[columns]
    row = st.tuples(keys, commands(type_, entry_type))
    steps = st.one_of(
        st.tuples(st.just("epoch"), st.lists(row, max_size=8)),
        st.tuples(st.just("epoch"), st.lists(row, max_size=8)),
        st.tuples(st.just("broken epoch"), st.lists(row, min_size=1, max_size=4)),
        st.tuples(st.just("lead"), st.sampled_from([1, 2, 3, 5, GROUP_COUNT])),
    )
    with tempfile.TemporaryDirectory() as scratch:
        machine = JobMachine(ddl, type_, entry_type, backend_name(backend), scratch)
        machine.lead(2, Trouble(random.Random(seed), trouble))
        models: dict[Any, Model] = {}
        expected: dict[int, str] = {}
        for step, drawn in data.draw(st.lists(steps, min_size=1, max_size=14)):
            if step == "lead":
                machine.lead(drawn, Trouble(random.Random(seed), trouble))
                continue
            rows = [(*key, len(expected) + at, *packed(c)) for at, (key, c) in enumerate(drawn)]
            if step == "broken epoch":
                rows.append((*drawn[0][0], -1, "raise", b""))
                machine.cluster.trouble.chance = 0.0
                with pytest.raises(FunctionError, match="as told"):
                    machine.run_batch(rows)
                # As a run does: it ends, and the next one takes over.
                machine.lead(machine.coordinator.parallelism, Trouble(random.Random(seed), trouble))
                continue
            machine.run_batch(rows)
            for key, command in drawn:
                model = models.setdefault(grouped(key), Model(type_, entry_type))
                model.do(*command)
                expected[len(expected)] = model.seen()
            assert machine.seen == expected
        assert verify(machine.store).ok
        newest = machine.coordinator.newest
        held = {}
        if newest is not None:
            held = stored_state(machine.store, machine.graph(Collect()), newest)["op"]
        stored = {grouped(key): values for key, values in held.items()}
        # As text, in which NaN is equal to NaN.
        wanted = {key: model.stored() for key, model in models.items() if model.stored()}
        assert canonical(stored) == canonical(wanted)


def packed(command: tuple[Any, ...]) -> tuple[str, bytes]:
    return command[0], pickle.dumps(command[1:])


def grouped(key: Any) -> Any:
    """A key as Spark groups it: one NaN, no -0.0; a single column stands for itself."""
    if isinstance(key, tuple):
        parts = tuple(map(grouped, key))
        return parts[0] if len(parts) == 1 else parts
    if isinstance(key, float):
        return "NaN" if math.isnan(key) else key + 0.0
    return key


def canonical(held: dict[Any, dict[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    return sorted(
        (repr(key), sorted((name, as_text(value)) for name, value in values.items()))
        for key, values in held.items()
    )


def as_text(value: Any) -> str:
    if type(value) is dict:
        return repr(sorted(value.items(), key=repr))
    return repr(tuple(value)) if isinstance(value, tuple) else repr(value)


def test_scratch_is_left_empty_by_compactions(tmp_path: Path) -> None:
    machine = JobMachine("k long", "bigint", "string", "heap", str(tmp_path))
    machine.lead(2, Trouble(random.Random(0)))
    for at in range(12):
        machine.run_batch([(key, at, "list.append", pickle.dumps((key,))) for key in range(40)])
    newest = machine.coordinator.newest
    assert newest is not None
    kinds = {ref.kind for part in newest.operators["op"].ranges for ref in part.files}
    assert "base" in kinds
    assert list(tmp_path.iterdir()) == []
