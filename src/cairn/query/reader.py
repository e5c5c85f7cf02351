"""State as a DataFrame, read by Spark's executors, each a few key groups.

The epoch is fixed, and held, when the DataFrame is made; rows are read when it is used. The
hold ends by itself, or with the driver's process.

Always true here:
- a DataFrame shows one committed epoch, whatever the job does meanwhile;
- executors need cairn, and no code of the job;
- partitions have about as many rows each, however the keys are spread over key groups.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from cairn.errors import QueryError, StateNotFoundError
from cairn.plan.sql import quote
from cairn.report.epoch import Measured, Timings
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.diff import Example, changes, diff_pieces, is_comparable
from cairn.snapshots.reader import EpochReader
from cairn.snapshots.shape import KEY_GROUP, TIME, Shape, key_columns, times
from cairn.snapshots.stored_states import EpochStates
from cairn.snapshots.tables import StateSource, StateTable, open_epoch, open_state
from cairn.state import ONE_VALUE_KINDS
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.store import NotFoundError, Store, open_store
from cairn.types import schema_ddl
from cairn.types.durations import Duration, duration_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_ROWS: Final = 1 << 22
SENT_ROWS: Final = 1 << 16
"""To Spark at once: what is still in the processor's cache when it is written."""
KEPT_BYTES: Final = 128 << 20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_DIFF_ROWS: Final = 1 << 14
_DIFF_NAMES: Final = frozenset({"change", "entry", "position", "time", "before", "after"})


def read_state(
    spark: SparkSession,
    checkpoint: str,
    operator: str,
    state: str,
    epoch: int | None = None,
    *,
    hold: Duration = "1 hour",
) -> DataFrame:
    """A state as a DataFrame: of the newest epoch of a checkpoint, or another one it keeps.

    `checkpoint` may be a branch or a savepoint too. The columns are `key_group`, the key columns
    by their names, then `value`; of map state `entry` and `value`, a row per entry; of lists
    `position` and `value`, a row per item; of timers (the states `timers.event` and
    `timers.processing`) `time`; and `written_at` of state that expires. The value of `object`
    state is its pickle.

    The job may go on meanwhile: the epoch is held for as long as `hold` says, or until this
    process ends. As long, the job keeps that epoch and all after it: who reads often, or
    reads a job with short epochs, gives no more than the DataFrame is used for.
    """
    with contextlib.ExitStack() as opened:
        hold_ms = duration_ms(hold, "hold")
        source = opened.enter_context(open_state(checkpoint, epoch, hold_ms=hold_ms))
        table = source.table(operator, state)
        groups = table.splits(_part_count(spark, table.rows))
        slim = None
        if isinstance(source.states, EpochStates):
            slim = _slim(source.states.epoch, [table.uid])
        sent = _Sent(table)
        read = _ReadGroups(source, table.uid, state, groups, slim, sent)
        frame = sent.restore(_map_parts(spark, len(groups), read, sent.schema))
        _keep(opened, [source])
    return frame


def diff_state(
    spark: SparkSession,
    checkpoint: str,
    operator: str,
    state: str,
    from_epoch: int,
    to_epoch: int,
    *,
    hold: Duration = "1 hour",
) -> DataFrame:
    """Return the differences of a state between two retained epochs, as a DataFrame.

    A row per key that differs (of map state, per entry): `change` is "added", "removed" or
    "changed", then the key columns (and `entry`, or `time` of timers), `before` and `after`. Of
    list state these are whole lists.
    """
    hold_ms = duration_ms(hold, "hold")
    sides = []
    with contextlib.ExitStack() as opened:
        for number in (from_epoch, to_epoch):
            source = opened.enter_context(open_state(checkpoint, number, hold_ms=hold_ms))
            if not isinstance(source.states, EpochStates):
                raise QueryError(
                    f"{checkpoint} is a savepoint, which has one epoch only\n"
                    "  next: give a checkpoint, or compare two DataFrames of cairn.read_state"
                )
            sides.append(source)
        entry, shape, before, after = _comparable(sides, operator, state)
        epochs = [_slim(_epoch(source), [entry]) for source in sides]
        pieces = diff_pieces(epochs[0], epochs[1], entry)
        parts = max(1, min(pieces, 4 * spark.sparkContext.defaultParallelism))
        read = _ReadChanges(sides[0].url, epochs, entry, state, pieces, parts)
        frame = _map_parts(spark, parts, read, _diff_schema(shape, before, after))
        _keep(opened, sides)
    return frame


_holds: dict[str, tuple[Store, list[str]]] = {}
"""Those of DataFrames, by the checkpoint they are in."""


def _keep(opened: contextlib.ExitStack, sources: list[StateSource]) -> None:
    """Their holds stay until they are over, or this process ends."""
    for source in sources:
        if not isinstance(source.states, EpochStates):
            source.close()
        elif source.states.hold_path is not None:
            _, paths = _holds.setdefault(source.url, (source.states.store, []))
            paths.append(source.states.hold_path)
    opened.pop_all()


@atexit.register
def _let_go() -> None:
    while _holds:
        _, (store, paths) = _holds.popitem()
        with contextlib.suppress(Exception):
            store.delete(paths)


@functools.cache
def _keep_memory() -> None:
    """Make the allocator of this worker keep freed memory for the next read.

    By default it returns large pieces to the system and requests them again page by page, which
    takes a third of the time of reading.
    """
    with contextlib.suppress(AttributeError):  # Not every system has it.
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


@functools.cache
def _spare_collector() -> None:
    """Exclude loaded objects from garbage collection: Spark's worker collects after every task."""
    gc.freeze()


def _part_count(spark: SparkSession, rows: int) -> int:
    """Return a multiple of the number of cores, so that no core is idle at the end."""
    cores: int = max(1, spark.sparkContext.defaultParallelism)
    return cores * max(1, math.ceil(rows / PARTITION_ROWS / cores))


class _Sent:
    """Rows of a table on their way to Spark: what Spark can make of them itself is left out.

    Spark copies what comes from Python row by row, nested values twice as slowly. So the fields of
    a value come as columns, and key groups not at all where a key says its own. Spark puts that
    together, and only what of it is used.
    """

    def __init__(self, table: StateTable) -> None:
        self._names = table.schema.names
        self._group = _group_sql(table)
        fields: list[pa.Field] = []
        self._fields: list[str] = []
        """Fields of a value that is split into columns."""
        for field in table.schema:
            # A value of such a state is there, or its row is not: a null could not be told apart.
            is_whole = field.name == "value" and table.kind in ONE_VALUE_KINDS
            if is_whole and pa.types.is_struct(field.type) and field.type.num_fields:
                self._fields = [part.name for part in field.type]
                fields += [pa.field(_part(n), part.type) for n, part in enumerate(field.type)]
            elif field.name != KEY_GROUP or self._group is None:
                fields.append(field)
        self.schema = pa.schema(fields)

    def batches(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """In a worker: what is sent."""
        columns: list[pa.Array] = []
        for name, column in zip(self._names, batch.columns, strict=True):
            if name == "value" and self._fields:
                columns += column.flatten()
            elif name != KEY_GROUP or self._group is None:
                columns.append(column)
        sent = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        for start in range(0, sent.num_rows, SENT_ROWS):
            yield sent.slice(start, SENT_ROWS)

    def restore(self, frame: DataFrame) -> DataFrame:
        """Return the frame with the columns of the table."""
        columns = {name: quote(name) for name in self.schema.names}
        if self._group is not None:
            columns[KEY_GROUP] = self._group
        if self._fields:
            parts = [f"{_part(n)} AS {quote(name)}" for n, name in enumerate(self._fields)]
            columns["value"] = f"struct({', '.join(parts)})"
        return frame.selectExpr(*(f"{columns[name]} AS {quote(name)}" for name in self._names))


def _group_sql(table: StateTable) -> str | None:
    """Return the SQL by which Spark finds the group of a key; None if it is not safe to use."""
    # Zeros and NaNs of floats have several forms.
    has_floats = any(pa.types.is_floating(t) or pa.types.is_nested(t) for t in table.key_types)
    if table.scope != "keyed" or has_floats:
        return None
    names = ", ".join(quote(name) for name in table.key_names)
    return f"cast(pmod(xxhash64({names}), {len(table.groups)}) AS int)"


def _part(number: int) -> str:
    return f"_cairn_value_{number}"


class _ReadGroups:
    """In a worker: the rows of some key groups, given the numbers of their ranges."""

    def __init__(
        self,
        source: StateSource,
        entry: str,
        state: str,
        groups: list[range],
        epoch: Epoch | None,
        sent: _Sent,
    ) -> None:
        self.url = source.url
        self.max_parallelism = source.max_parallelism
        self.entry = entry
        self.state = state
        self.groups = groups
        self.epoch = epoch
        self.sent = sent

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        _keep_memory()
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        with self._open() as source:
            table = source.table(self.entry, self.state)
            for number in numbers:
                for batch in table.batches(self.groups[number], ordered=False):
                    yield from self.sent.batches(batch)
        _spare_collector()

    def _open(self) -> StateSource:
        if self.epoch is None:
            return open_state(self.url)
        return open_epoch(_open_here(self.url), self.epoch, self.max_parallelism)


def _open_here(url: str) -> Store:
    """Open a checkpoint in a worker, on whatever machine it is."""
    try:
        return open_store(url, create=False)
    except NotFoundError:
        raise QueryError(
            f"an executor on {os.uname().nodename} does not see the checkpoint\n  expected: {url}\n"
            "  next: read a checkpoint that driver and executors share: a bucket, or a folder that "
            "is mounted at this path on all of them",
            url=url,
        ) from None


@dataclass(eq=False, repr=False)
class _ReadChanges:
    """In a worker: what differs in some of the pieces."""

    url: str
    epochs: list[Epoch]
    entry: str
    state: str
    pieces: int
    parts: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = _open_here(self.url)
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        wanted = {n for n in range(self.pieces) if n % self.parts in numbers}
        before, after = self.epochs
        with EpochReader(store, before) as old, EpochReader(store, after) as new:
            sides = [_columns(reader, self.entry, self.state) for reader in (old, new)]
            held = [columns for columns in sides if columns is not None]
            shape = Shape(held[-1], self._scope())
            rows: list[tuple[str, Example]] = []
            for change in changes(old, new, self.entry, self.state, wanted):
                rows.append(change)
                if len(rows) == _DIFF_ROWS:
                    yield _diff_batch(shape, held[0], held[-1], rows)
                    rows = []
            if rows:
                yield _diff_batch(shape, held[0], held[-1], rows)

    def _scope(self) -> Any:
        held = [e.operators[self.entry] for e in self.epochs if self.entry in e.operators]
        return held[-1].scope


def _map_parts(spark: SparkSession, parts: int, read: Any, schema: pa.Schema) -> DataFrame:
    ddl = schema_ddl(schema)
    return spark.range(0, parts, 1, parts).mapInArrow(read, ddl)


def _epoch(source: StateSource) -> Epoch:
    assert isinstance(source.states, EpochStates)
    return source.states.epoch


def _slim(epoch: Epoch, entries: list[str]) -> Epoch:
    """Return an epoch with only the parts that a worker needs."""
    return msgspec.structs.replace(
        epoch,
        operators={uid: each for uid, each in epoch.operators.items() if uid in entries},
        spark=SparkPosition(folder="", batch_id=0, offsets=""),
        committables={},
        timings=Timings(),
        metrics=Measured(),
        timers=None,
    )


# Columns of a difference


def _comparable(
    sides: list[StateSource], operator: str, state: str
) -> tuple[str, Shape, StateColumns, StateColumns]:
    """The entry that has the state, what it looks like, and its columns in either epoch."""
    tables = []
    for source in sides:
        try:
            tables.append(source.table(operator, state))
        except StateNotFoundError:
            if source is sides[-1] and not tables:
                raise
    before, after = tables[0], tables[-1]
    if before.uid != after.uid or not is_comparable(before.columns, after.columns):
        raise QueryError(
            f"{operator}.{state} is not the same kind of state in both epochs\n"
            f"  found: {before!r} by {', '.join(before.key_names)}, "
            f"then {after!r} by {', '.join(after.key_names)}\n"
            "  next: read both with cairn.read_state",
            operator=operator,
            state=state,
        )
    return after.uid, after.shape, before.columns, after.columns


def _columns(reader: EpochReader, entry: str, state: str) -> StateColumns | None:
    if entry not in reader.epoch.operators:
        return None
    return reader.columns(entry).get(state)


def _diff_schema(shape: Shape, before: StateColumns, after: StateColumns) -> pa.Schema:
    names = key_columns(shape.columns.key_names, _DIFF_NAMES)
    fields = [pa.field("change", pa.string())]
    fields += [pa.field(name, type) for name, type in zip(names, shape.key_types, strict=True)]
    if shape.kind == "timers":
        fields.append(pa.field("time", TIME))
    elif shape.kind in ("operator-list", "feedback"):
        fields.append(pa.field("position", pa.int64()))
    elif shape.columns.entries is not None:
        fields.append(pa.field("entry", shape.columns.entries.arrow))
    fields.append(pa.field("before", before.schema.field("value").type))
    fields.append(pa.field("after", after.schema.field("value").type))
    return pa.schema(fields)


def _diff_batch(
    shape: Shape, before: StateColumns, after: StateColumns, rows: list[tuple[str, Example]]
) -> pa.RecordBatch:
    keys = shape.columns.keys.encode([each.key for _, each in rows])
    found = [pa.array([change for change, _ in rows], pa.string()), *shape.key_parts(keys)]
    entries = [each.entry for _, each in rows]
    if shape.kind == "timers":
        found.append(times(pa.array(entries, pa.int64())))
    elif shape.kind == "operator-list":
        found.append(pa.array([place[0] for place in entries], pa.int64()))
    elif shape.columns.entries is not None:
        found.append(shape.columns.entries.encode(entries))
    found.append(before.whole_values.encode([each.before for _, each in rows]))
    found.append(after.whole_values.encode([each.after for _, each in rows]))
    return pa.RecordBatch.from_arrays(found, schema=_diff_schema(shape, before, after))
