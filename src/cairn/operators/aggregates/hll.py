"""Approximate numbers of distinct values: sketches of 64-bit hashes, many at once.

A sketch keeps the hashes themselves while they are few, so small counts are exact,
then 2^11 registers (HyperLogLog with Ertl's estimator; a relative error of about 2.3 %).

Always true here:
- the order of hashes and of merges does not matter;
- a stored sketch is a mark and then its hashes, in order, or its registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.operators.aggregates.parts import Ints

BITS = 11
REGISTERS = 1 << BITS
SPARSE_MAX = 256
_RANK_MAX = 64 - BITS + 1
_HASH = np.dtype("<u8")

Hashes = npt.NDArray[np.uint64]
Registers = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]


@dataclass
class Sketches:
    """A column of sketches: hashes with the row of each, and registers of some rows."""

    count: int
    rows: Ints
    hashes: Hashes
    """In the order of (row, hash), each once; those of Spark's partials are as they come."""
    dense: Ints
    """The rows with registers, in order. They have no hashes."""
    registers: Registers
    """A line per dense row."""


def no_values(count: int) -> Sketches:
    none = np.zeros(0, np.int64)
    return Sketches(count, none, none.astype(np.uint64), none, np.zeros((0, REGISTERS), np.uint8))


def merge(into: Sketches, at: Ints, more: Sketches) -> Sketches:
    """Merge row i of `more` into row at[i]."""
    count = into.count
    rows = np.concatenate([into.rows, at[more.rows]])
    hashes = np.concatenate([into.hashes, more.hashes])
    ranked = np.lexsort((hashes, rows))
    rows, hashes = rows[ranked], hashes[ranked]
    is_new = np.ones(len(rows), np.bool_)
    is_new[1:] = (rows[1:] != rows[:-1]) | (hashes[1:] != hashes[:-1])
    rows, hashes = rows[is_new], hashes[is_new]
    is_dense = np.bincount(rows, minlength=count) > SPARSE_MAX
    is_dense[into.dense] = True
    is_dense[at[more.dense]] = True
    dense = np.flatnonzero(is_dense)
    if not len(dense):
        return Sketches(count, rows, hashes, dense, into.registers)
    line = np.zeros(count, np.int64)
    line[dense] = np.arange(len(dense))
    registers = np.zeros((len(dense), REGISTERS), np.uint8)
    registers[line[into.dense]] = into.registers
    np.maximum.at(registers, line[at[more.dense]], more.registers)
    is_out = is_dense[rows]
    _add_hashes(registers, line[rows[is_out]], hashes[is_out])
    return Sketches(count, rows[~is_out], hashes[~is_out], dense, registers)


def take(sketches: Sketches, rows: Ints) -> Sketches:
    sizes = np.bincount(sketches.rows, minlength=sketches.count)
    starts = np.cumsum(sizes) - sizes
    taken = sizes[rows]
    at = np.repeat(starts[rows] - (np.cumsum(taken) - taken), taken) + np.arange(taken.sum())
    line = np.full(sketches.count, -1, np.int64)
    line[sketches.dense] = np.arange(len(sketches.dense))
    dense = np.flatnonzero(line[rows] >= 0)
    return Sketches(
        len(rows),
        np.repeat(np.arange(len(rows)), taken),
        sketches.hashes[at],
        dense,
        sketches.registers[line[rows[dense]]],
    )


def concat(first: Sketches, second: Sketches) -> Sketches:
    return Sketches(
        first.count + second.count,
        np.concatenate([first.rows, second.rows + first.count]),
        np.concatenate([first.hashes, second.hashes]),
        np.concatenate([first.dense, second.dense + first.count]),
        np.concatenate([first.registers, second.registers]),
    )


def estimate(sketches: Sketches) -> Ints:
    found: Ints = np.bincount(sketches.rows, minlength=sketches.count)
    if len(sketches.dense):
        found[sketches.dense] = _estimate(sketches.registers)
    return found


def from_lists(lists: pa.Array) -> Sketches:
    """Return the sketches of lists of hashes, as Spark sends them."""
    found = no_values(len(lists))
    sizes = np.asarray(lists.value_lengths().fill_null(0))
    found.rows = np.repeat(np.arange(len(lists)), sizes)
    found.hashes = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
    return found


def from_binary(stored: pa.Array) -> Sketches:
    """Return stored sketches; null is one without values."""
    found = no_values(len(stored))
    if stored.null_count == len(stored):
        return found
    _, offset_buffer, data_buffer = stored.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[stored.offset :][: len(stored) + 1]
    starts, sizes = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    sizes[np.asarray(stored.is_null())] = 0
    data = np.frombuffer(data_buffer, np.uint8)
    some = np.flatnonzero(sizes)
    is_dense = data[starts[some]] == 1
    found.dense = some[is_dense]
    found.registers = data[starts[found.dense][:, None] + 1 + np.arange(REGISTERS)]
    sparse = some[~is_dense]
    counts = (sizes[sparse] - 1) // 8
    found.rows = np.repeat(sparse, counts)
    found.hashes = _words(data, starts[sparse] + 1, counts).view(_HASH).astype(np.uint64).ravel()
    return found


def to_binary(sketches: Sketches) -> pa.Array:
    counts = np.bincount(sketches.rows, minlength=sketches.count)
    sizes = 1 + 8 * counts
    sizes[sketches.dense] = 1 + REGISTERS
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    data = np.zeros(offsets[-1], np.uint8)
    starts = offsets[:-1]
    data[starts[sketches.dense]] = 1
    data[starts[sketches.dense][:, None] + 1 + np.arange(REGISTERS)] = sketches.registers
    bytes_ = sketches.hashes.astype(_HASH).view(np.uint8).reshape(-1, 8)
    data[_word_places(starts + 1, counts)] = bytes_
    if offsets[-1] >= 1 << 31:
        raise pa.ArrowCapacityError("sketches of one batch exceed 2 GB")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), sketches.count, buffers)


def _words(data: npt.NDArray[np.uint8], starts: Ints, counts: Ints) -> npt.NDArray[Any]:
    return np.ascontiguousarray(data[_word_places(starts, counts)])


def _word_places(starts: Ints, counts: Ints) -> Ints:
    """Return the places of the bytes of words, a line per word."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places: Ints = (np.repeat(starts, counts) + 8 * within)[:, None] + np.arange(8)
    return places


def _add_hashes(registers: Registers, line: Ints, hashes: Hashes) -> None:
    register = (hashes >> np.uint64(64 - BITS)).astype(np.int64)
    rest = hashes & np.uint64((1 << (64 - BITS)) - 1)
    # A double holds 53 bits exactly, so its exponent is the place of the highest bit.
    highest = np.frexp(rest.astype(np.float64))[1]
    ranks = (_RANK_MAX - highest).astype(np.uint8)
    np.maximum.at(registers.reshape(-1), line * REGISTERS + register, ranks)


def _estimate(registers: Registers) -> Ints:
    lines, width = len(registers), _RANK_MAX + 1
    places = registers.astype(np.int64) + np.arange(lines)[:, None] * width
    counts = np.bincount(places.ravel(), minlength=lines * width).reshape(lines, width)
    z = REGISTERS * _tau(1 - counts[:, _RANK_MAX] / REGISTERS)
    for rank in range(_RANK_MAX - 1, 0, -1):
        z = 0.5 * (z + counts[:, rank])
    z += REGISTERS * _sigma(counts[:, 0] / REGISTERS)
    return np.rint(REGISTERS * REGISTERS / (2 * math.log(2) * z)).astype(np.int64)


def _sigma(x: Floats) -> Floats:
    # It is infinite if all registers are empty; a dense sketch has some that are not.
    y, z = 1.0, x.copy()
    while True:
        x = x * x
        before = z
        z = z + x * y
        y += y
        if (z == before).all():
            return z


def _tau(x: Floats) -> Floats:
    is_limit = (x == 0.0) | (x == 1.0)
    y, z = 1.0, 1 - x
    while True:
        x = np.sqrt(x)
        before = z
        y *= 0.5
        z = z - (1 - x) ** 2 * y
        if ((z == before) | is_limit).all():
            return np.where(is_limit, 0.0, z / 3)
