"""The parts of accumulators: sums, counts, extremes and moments, in numpy columns.

The partials that Spark sends and the accumulators in state have one form, so that any two of
them can be merged.

Always true here:
- `merge` changes its first side only, and works on all rows at once;
- a part without values gives null;
- a sum that leaves its type raises; it never wraps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.errors import FunctionError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
Columns = list[Any]
"""The columns of one part: numpy arrays, or an Arrow array if numpy has no such type."""


class Part(ABC):
    """Columns that are merged together."""

    names: tuple[str, ...]

    @property
    @abstractmethod
    def types(self) -> tuple[pa.DataType, ...]:
        """Types of the columns in state."""

    @property
    def partial_types(self) -> tuple[pa.DataType, ...]:
        """Types of the columns that Spark sends."""
        return self.types

    @abstractmethod
    def zeros(self, count: int) -> Columns:
        """Return rows without values."""

    @abstractmethod
    def load(self, arrays: list[pa.Array]) -> Columns:
        """Return the columns of stored arrays; null for new rows."""

    def read(self, arrays: list[pa.Array]) -> Columns:
        """Return the columns of partials that Spark sends."""
        return self.load(arrays)

    @abstractmethod
    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        """Merge row i of `columns` into row at[i]; several rows may go to one."""

    @abstractmethod
    def store(self, columns: Columns) -> list[pa.Array]:
        """Return the arrays to store."""

    def take(self, columns: Columns, rows: Ints) -> Columns:
        return [
            column.take(pa.array(rows)) if isinstance(column, pa.Array) else column[rows]
            for column in columns
        ]

    def concat(self, first: Columns, second: Columns) -> Columns:
        return [
            join_rows(a, b) if isinstance(a, pa.Array) else np.concatenate([a, b])
            for a, b in zip(first, second, strict=True)
        ]


class Count(Part):
    names = ("n",)
    types = (pa.int64(),)

    def zeros(self, count: int) -> Columns:
        return [np.zeros(count, np.int64)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [plain(arrays[0])]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        np.add.at(into[0], at, columns[0])

    def store(self, columns: Columns) -> list[pa.Array]:
        return [pa.array(columns[0])]


class Sum(Part):
    """Sum of bigint or double."""

    names = ("sum",)

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (self.type,)

    def zeros(self, count: int) -> Columns:
        return [np.zeros(count, self.type.to_pandas_dtype()), np.zeros(count, np.bool_)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [plain(arrays[0]), validity(arrays[0])]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        values, seen = columns
        if not seen.all():
            at, values = at[seen], values[seen]
        held, held_seen = into
        held_seen[at] = True
        if self.type == pa.float64():
            held += np.bincount(at, weights=values, minlength=len(held))
            return
        fresh = np.zeros_like(held)
        np.add.at(fresh, at, values)
        if len(values) and _may_wrap(values):
            _check_sums(at, values, len(held))
        total = held + fresh
        if (((held ^ total) & (fresh ^ total)) < 0).any():
            raise sum_overflow("bigint")
        held[:] = total

    def store(self, columns: Columns) -> list[pa.Array]:
        return [with_nulls(columns[0], columns[1])]


class Extreme(Part):
    """Minimum or maximum of a type that numpy has."""

    def __init__(self, type_: pa.DataType, *, is_max: bool) -> None:
        self.type = type_
        self.is_max = is_max
        self.names = ("max" if is_max else "min",)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (self.type,)

    @property
    def _plain_type(self) -> pa.DataType:
        if pa.types.is_boolean(self.type):
            return pa.uint8()
        if pa.types.is_date(self.type):
            return pa.int32()
        return self.type if is_number(self.type) else pa.int64()

    def zeros(self, count: int) -> Columns:
        kind = self._plain_type.to_pandas_dtype()
        start: float
        if np.issubdtype(kind, np.floating):
            # NaN is greater than all other values: `maximum` keeps it, `fmin` ignores it.
            start = -np.inf if self.is_max else np.nan
        else:
            start = np.iinfo(kind).min if self.is_max else np.iinfo(kind).max
        return [np.full(count, start, kind), np.zeros(count, np.bool_)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        array = arrays[0].cast(self._plain_type)
        columns = self.zeros(len(array))
        seen = validity(array)
        columns[0][seen] = plain(array)[seen]
        columns[1][:] = seen
        return columns

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        values, seen = columns
        if not seen.all():
            at, values = at[seen], values[seen]
        with np.errstate(invalid="ignore"):
            (np.maximum if self.is_max else np.fmin).at(into[0], at, values)
        into[1][at] = True

    def store(self, columns: Columns) -> list[pa.Array]:
        return [with_nulls(columns[0], columns[1]).cast(self.type)]


class Moments(Part):
    """Count, mean and the sum of squared distances from the mean: enough for variances."""

    names = ("n", "mean", "m2")
    types = (pa.int64(), pa.float64(), pa.float64())

    def zeros(self, count: int) -> Columns:
        return [np.zeros(count), np.zeros(count), np.zeros(count)]

    def load(self, arrays: list[pa.Array]) -> Columns:
        return [plain(array).astype(np.float64) for array in arrays]

    def merge(self, into: Columns, at: Ints, columns: Columns) -> None:
        some = columns[0] > 0
        if not some.all():
            at, columns = at[some], [column[some] for column in columns]
        n, mean, m2 = columns
        held_n, held_mean, held_m2 = into
        count = len(held_n)
        with np.errstate(invalid="ignore", over="ignore"):
            total = held_n + np.bincount(at, weights=n, minlength=count)
            # Distances from the present mean, then shifted: exact also far from zero.
            shift = np.bincount(at, weights=n * (mean - held_mean[at]), minlength=count)
            new_mean = held_mean + shift / np.maximum(total, 1)
            fresh = m2 + n * (mean - new_mean[at]) ** 2
            was = held_n > 0
            moved = np.where(was, held_n * (held_mean - new_mean) ** 2, 0.0)
            held_m2 += moved + np.bincount(at, weights=fresh, minlength=count)
        held_n[:] = total
        held_mean[:] = new_mean

    def store(self, columns: Columns) -> list[pa.Array]:
        n, mean, m2 = columns
        return [pa.array(n.astype(np.int64)), pa.array(mean), pa.array(m2)]


def is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_))


def plain(array: pa.Array) -> Array:
    """Return numbers as a writable numpy array, zero for null."""
    if array.null_count:
        array = array.fill_null(0)
    numbers: Array = array.to_numpy(zero_copy_only=False)
    return numbers if numbers.flags.writeable else numbers.copy()


def validity(array: pa.Array) -> Bools:
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    found: Bools = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def join_rows(first: pa.Array, second: pa.Array) -> pa.Array:
    """Return the rows of both; the second is cast to the type of the first."""
    return pa.concat_arrays([first, second.cast(first.type)])


def with_nulls(values: Array, seen: Bools) -> pa.Array:
    return pa.array(values, mask=None if seen.all() else ~seen)


def sum_overflow(ddl: str) -> FunctionError:
    return FunctionError(
        f"a sum is out of the range of {ddl}\n"
        "  next: sum a wider type, as in sum(cast(v AS double)) or sum(cast(v AS decimal(38,0)))"
    )


def _may_wrap(values: Ints) -> bool:
    largest = max(abs(int(values.min())), abs(int(values.max())))
    return largest * len(values) >= 1 << 63


def _check_sums(at: Ints, values: Ints, count: int) -> None:
    """Raise if a sum of a batch overflows; computed with numbers that do not wrap."""
    sums = np.zeros(count, object)
    np.add.at(sums, at, values.astype(object))
    if any(not -(1 << 63) <= total < 1 << 63 for total in sums[np.unique(at)]):
        raise sum_overflow("bigint")
