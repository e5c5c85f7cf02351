"""Rows of one state in a database, by the batch: names and values are columns.

A name is a key, or a key and an entry of its map. The rows are those that `rows` and `maps`
read and write one by one.

Always true here:
- nothing is kept in memory but a filter of the names that were written;
- a database that takes rows at any time is written between epochs, when no base still needs it as
  it is; others are written by bases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.cached.database import Database, Op
from cairn.backends.cached.maps import CachedMapRows
from cairn.backends.cached.name_filter import NameFilter
from cairn.backends.cached.packed_columns import is_packable, pack_columns, unpack_column
from cairn.backends.cached.rows import CachedRows
from cairn.backends.columnar.key_index import NameIndex
from cairn.backends.columnar.name_parts import Ints
from cairn.key_groups import hash_names

if TYPE_CHECKING:
    from cairn.backends.cached.backend import CachedBackend
    from cairn.backends.overlay import Table

Bools = npt.NDArray[np.bool_]
_NULL = pa.scalar(None, pa.binary())
_ENTRIES_AT_ONCE = 64 * 1024


class Stored(NamedTuple):
    """Rows to write, of one piece of key groups."""

    names: Sequence[pa.Array]
    groups: Ints
    values: pa.Array
    is_held: Bools
    """False deletes."""
    was_held: Bools


Counted = tuple[Ints, Ints, Ints]
"""Key groups, and by how many keys and rows each of them grows."""


class Unwritten:
    """Rows of a table that a base writes, on another thread."""

    def __init__(self, below: StoredColumns) -> None:
        self.below = below
        self.parts: list[tuple[Database, list[Stored]]] = []
        self.is_written = False
        self.is_over = False
        self.counted: list[Counted] = []
        """Changes of the counts that were made so far."""

    @property
    def row_count(self) -> int:
        return sum(len(piece.groups) for _, pieces in self.parts for piece in pieces)

    @property
    def uncounted(self) -> int:
        """The change of the number of rows that is still to be counted."""
        whole = sum(
            int(piece.is_held.sum()) - int(piece.was_held.sum())
            for _, pieces in self.parts
            for piece in pieces
        )
        return whole - sum(int(entries.sum()) for _, _, entries in list(self.counted))

    def ops(self) -> Iterator[tuple[Database, Iterator[Op]]]:
        """Yield the rows as database operations, a piece of key groups at a time."""
        for database, pieces in self.parts:
            for piece in pieces:
                yield database, self.below.ops(database, piece, self.counted)

    def end(self, *, is_written: bool) -> None:
        if not self.is_over:
            self.is_written = is_written
            self.is_over = True


class StoredColumns:
    """The rows of a table in arrays that are in a database."""

    def __init__(self, table: Table, backend: CachedBackend, types: Sequence[pa.DataType]) -> None:
        self._table = table
        self._backend = backend
        self._types = types
        self._packing = backend.packings()[table.name]
        self._filter: NameFilter | None = None
        """Names that the database may have; None if it may have any, or has none."""

    def rows(self, group: int) -> CachedRows:
        return cast(CachedRows, self._table.rows[group])

    def is_used(self) -> bool:
        """True if the database has, or has had, rows of the table."""
        return any(self.rows(group).database for group in self._table.groups)

    def forget_filter(self) -> None:
        """Ask the database for all names from now on."""
        self._filter = None

    def count(self) -> tuple[int, int]:
        """Return the number of keys and of rows."""
        rows = [self.rows(group) for group in self._table.groups]
        return sum(map(len, rows)), sum(each.entry_count() for each in rows)

    # Reading

    def read(self, names: list[pa.Array], groups: Ints) -> tuple[pa.Array, Bools]:
        """Return the values of names, and which names there are."""
        likely = np.arange(len(groups))
        if self._filter is not None:
            likely = np.flatnonzero(self._filter.may_have(hash_names(names, self._types)))
        raws, at = [pa.nulls(1, pa.binary())], np.zeros(len(groups), np.int64)
        row_count = 1
        for database, places in self._by_database(groups[likely]):
            if database is not None:
                places = likely[places]
                some = [array.take(pa.array(places)) for array in names]
                packed = self._pack_names(database, some, groups[places])
                # In the order of the files, so that blocks are read once.
                order = pc.sort_indices(packed)
                found = database.get_many(packed.take(order).to_pylist())
                raws.append(pa.array(found, pa.binary()))
                at[places[order.to_numpy()]] = np.arange(row_count, row_count + len(places))
                row_count += len(places)
        held = pa.concat_arrays(raws).take(pa.array(at))
        return self._unpack_values(held), held.is_valid().to_numpy(zero_copy_only=False)

    def read_maps(self, keys: pa.Array, groups: Ints) -> tuple[Ints, pa.Array, pa.Array]:
        """Return all entries of keys: the index of the key, entry and value of each."""
        at: list[int] = []
        entries: list[bytes] = []
        raws: list[bytes] = []
        counts = self._read_headers(keys, groups)
        held = np.flatnonzero(counts)
        for database, places in self._by_database(groups[held]):
            assert database is not None, "it has headers"
            places = held[places]
            headers = self._pack_names(database, [keys.take(pa.array(places))], groups[places])
            found = self._read_entries(database, headers.to_pylist(), counts[places])
            named = zip(places.tolist(), headers.to_pylist(), found, strict=True)
            for place, header, rows in named:
                at += [place] * len(rows)
                entries += [name[len(header) :] for name, _ in rows]
                raws += [raw for _, raw in rows]
        column = self._unpack_values(pa.array(raws, pa.binary()))
        return np.array(at, np.int64), self._unpack_entries(entries), column

    def _read_entries(
        self, database: Database, headers: Sequence[bytes], counts: Ints
    ) -> list[list[tuple[bytes, bytes]]]:
        """Return the rows of the entries below each header; `counts` says how many these are."""
        if self._backend.writes_at_once:
            return [list(database.scan(header))[1:] for header in headers]
        # A server is asked for many keys at once, those of about as many entries together.
        found: list[list[tuple[bytes, bytes]]] = [[] for _ in headers]
        sizes = 1 << np.ceil(np.log2(counts)).astype(np.int64)
        for size in np.unique(sizes).tolist():
            of_size = np.flatnonzero(sizes == size)
            step = max(1, _ENTRIES_AT_ONCE // size)
            for start in range(0, len(of_size), step):
                places = of_size[start : start + step].tolist()
                names = self._read_names(database, [headers[at] for at in places], size)
                wanted = [
                    (at, name) for at, each in zip(places, names, strict=True) for name in each
                ]
                raws = database.get_many([name for _, name in wanted])
                for (at, name), raw in zip(wanted, raws, strict=True):
                    # One that is gone was deleted here, and a base has just ended.
                    if raw is not None:
                        found[at].append((name, raw))
        return found

    def _read_names(
        self, database: Database, headers: Sequence[bytes], size: int
    ) -> list[list[bytes]]:
        """Return the names below each header, of which there are about `size`."""
        cut = len(database.prefix(self._table.name, 0))
        names: list[list[bytes]] = [[] for _ in headers]
        # The first name is the header itself.
        after = {at: header[cut:] for at, header in enumerate(headers)}
        while after:
            starts = [(headers[at][:cut], name) for at, name in after.items()]
            pages = self._backend.read_pages(database, starts, size + 1)
            following: dict[int, bytes] = {}
            for at, (page, last) in zip(after, pages, strict=True):
                own = headers[at][cut:]
                names[at] += [headers[at][:cut] + n for n in page if n != own and n.startswith(own)]
                # A base that ends meanwhile may bring more of them than the header counts.
                if last is not None and last.startswith(own):
                    following[at] = last + b"\0"
            after = following
        return names

    def _read_headers(self, keys: pa.Array, groups: Ints) -> Ints:
        """Return the number of entries of each key."""
        counts = np.zeros(len(keys), np.int64)
        for database, at in self._by_database(groups):
            if database is not None:
                packed = self._pack_names(database, [keys.take(pa.array(at))], groups[at])
                raws = pa.array(database.get_many(packed.to_pylist()), pa.binary())
                counts[at] = unpack_column(raws, pa.int64()).fill_null(0).to_numpy()
        return counts

    def _by_database(self, groups: Ints) -> Iterator[tuple[Database | None, Ints]]:
        """Yield each database of these key groups, and where its groups are."""
        databases: dict[Database | None, list[int]] = {}
        for group in np.unique(groups).tolist():
            databases.setdefault(self.rows(group).database, []).append(group)
        for database, owned in databases.items():
            yield database, np.flatnonzero(np.isin(groups, owned))

    # Writing

    def prepare(self, groups: Ints, *, is_first: bool) -> list[tuple[Database, Ints]]:
        """Return the databases that take rows of these key groups, and where their groups are."""
        self._backend.settle_base()
        if is_first and not self.is_used():
            self._filter = NameFilter(self._backend.filter_bytes_max)
        for group in np.unique(groups).tolist():
            rows = self.rows(group)
            if rows.database is None:
                rows.bind(self._backend.database_of(group))
        return [(database, at) for database, at in self._by_database(groups) if database]

    def write(self, database: Database, pieces: Iterator[Stored]) -> None:
        """Write rows; each piece has whole key groups, later ones than the piece before."""
        self._backend.write_ops(database, (self.ops(database, piece) for piece in pieces))

    def ops(
        self, database: Database, piece: Stored, counted: list[Counted] | None = None
    ) -> Iterator[Op]:
        """Return rows as database operations, in order, and count them."""
        names, groups = piece.names, piece.groups
        added = piece.is_held.astype(np.int64) - piece.was_held
        if self._filter is not None:
            self._filter.add(hash_names(names, self._types))
        keys, contents = self._pack(database, piece)
        if len(names) > 1:
            headers = self._headers(database, names[0], groups, added, counted)
            keys = pa.concat_arrays([keys, headers[0]])
            contents = pa.concat_arrays([contents, headers[1]])
        else:
            self._count((groups, added, added), counted)
        order = pc.sort_indices(keys).to_pylist()
        rows = list(zip(keys.to_pylist(), contents.to_pylist(), strict=True))
        return map(rows.__getitem__, order)

    def _pack(self, database: Database, piece: Stored) -> tuple[pa.Array, pa.Array]:
        """Return the names of the rows in the database, and their contents."""
        keys = self._pack_names(database, piece.names, piece.groups)
        contents = self._pack_values(piece.values)
        if not piece.is_held.all():
            contents = pc.if_else(pa.array(piece.is_held), contents, _NULL)
        return keys, contents

    def _headers(
        self,
        database: Database,
        owners: pa.Array,
        groups: Ints,
        added: Ints,
        counted: list[Counted] | None,
    ) -> tuple[pa.Array, pa.Array]:
        """Return the rows with the numbers of entries of keys."""
        numbers, firsts = NameIndex(self._types[:1]).place([owners])
        keys, groups = owners.take(pa.array(firsts)), groups[firsts]
        more = np.bincount(numbers, added, len(firsts)).astype(np.int64)
        before = self._read_headers(keys, groups)
        counts = before + more
        self._count((groups, (counts > 0).astype(np.int64) - (before > 0), more), counted)
        contents = pc.if_else(pa.array(counts > 0), pack_columns([pa.array(counts)]), _NULL)
        return self._pack_names(database, [keys], groups), contents

    def _count(self, change: Counted, counted: list[Counted] | None) -> None:
        self._add_counts(*change)
        if counted is not None:
            counted.append(change)

    def take_back(self, counted: list[Counted]) -> None:
        """Undo the counts of a writer that gave up."""
        for groups, keys, entries in counted:
            self._add_counts(groups, -keys, -entries)

    def _add_counts(self, groups: Ints, keys: Ints, entries: Ints) -> None:
        for group in np.unique(groups).tolist():
            rows, is_here = self.rows(group), groups == group
            rows.held += int(keys[is_here].sum())
            if isinstance(rows, CachedMapRows):
                rows.entries_held += int(entries[is_here].sum())

    # The bytes of rows

    def _pack_names(self, database: Database, names: Sequence[pa.Array], groups: Ints) -> pa.Array:
        """Return the keys of names, or of the headers of maps, in a database."""
        prefix = database.prefix(self._table.name, 0)
        # The key group is in the first two bytes.
        head = np.empty((len(groups), len(prefix)), np.uint8)
        head[:] = np.frombuffer(prefix, np.uint8)
        head[:, :2] = groups.astype(">u2").view(np.uint8).reshape(-1, 2)
        if all(is_packable(type) for type in self._types):
            return pack_columns(names, head=head, are_keys=True)
        packing = self._packing
        keys = [packing.key(key) for key in packing.keys.decode_keys(names[0])]
        if len(names) > 1:
            assert packing.entries is not None
            entries = packing.entries.decode_keys(names[1])
            keys = [key + packing.entry(e) for key, e in zip(keys, entries, strict=True)]
        return pa.array([bytes(h) + k for h, k in zip(head, keys, strict=True)], pa.binary())

    def _pack_values(self, values: pa.Array) -> pa.Array:
        if is_packable(values.type):
            return pack_columns([values])
        packing = self._packing
        return pa.array([packing.value(v) for v in packing.values.decode(values)], pa.binary())

    def _unpack_values(self, raws: pa.Array) -> pa.Array:
        values = self._packing.values
        if is_packable(values.arrow):
            return unpack_column(raws, values.arrow)
        unpack = self._packing.value_of
        return values.encode([None if raw is None else unpack(raw) for raw in raws.to_pylist()])

    def _unpack_entries(self, raws: list[bytes]) -> pa.Array:
        if is_packable(self._types[1]):
            return unpack_column(pa.array(raws, pa.binary()), self._types[1])
        entries = self._packing.entries
        assert entries is not None
        return entries.encode([self._packing.entry_of(raw) for raw in raws])
