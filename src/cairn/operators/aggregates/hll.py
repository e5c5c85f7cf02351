"""Approximate number of distinct values: a sketch of their 64-bit hashes.

A sketch keeps the hashes themselves while they are few, so small counts are exact,
then 2^11 registers (HyperLogLog with Ertl's estimator; a relative error of about 2.3 %).

Always true here:
- a sketch is a sorted array of distinct uint64 hashes, or an array of uint8 registers;
- the order of hashes and of merges does not matter.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

BITS = 11
REGISTERS = 1 << BITS
SPARSE_MAX = 256
_RANK_MAX = 64 - BITS + 1

Sketch = npt.NDArray[np.unsignedinteger]

EMPTY: Sketch = np.empty(0, np.uint64)


def is_sparse(sketch: Sketch) -> bool:
    return sketch.dtype == np.uint64


def of_hashes(hashes: npt.NDArray[np.uint64]) -> Sketch:
    distinct = np.unique(hashes)
    return distinct if len(distinct) <= SPARSE_MAX else _dense(distinct)


def merge(left: Sketch, right: Sketch) -> Sketch:
    if is_sparse(left) and is_sparse(right):
        if not len(left) or not len(right):
            return left if len(left) else right
        return of_hashes(np.concatenate([left, right]))
    left, right = (_dense(s) if is_sparse(s) else s for s in (left, right))
    registers: Sketch = np.maximum(left, right)
    return registers


def estimate(sketch: Sketch) -> int:
    if is_sparse(sketch):
        return len(sketch)
    counts = np.bincount(sketch, minlength=_RANK_MAX + 1).tolist()
    z = REGISTERS * _tau(1 - counts[_RANK_MAX] / REGISTERS)
    for rank in range(_RANK_MAX - 1, 0, -1):
        z = 0.5 * (z + counts[rank])
    z += REGISTERS * _sigma(counts[0] / REGISTERS)
    return round(REGISTERS * REGISTERS / (2 * math.log(2) * z))


def to_bytes(sketch: Sketch) -> bytes:
    mark = b"\0" if is_sparse(sketch) else b"\1"
    return mark + sketch.astype(sketch.dtype.newbyteorder("<")).tobytes()


def from_bytes(data: bytes) -> Sketch:
    kind = np.dtype("<u8") if data[:1] == b"\0" else np.dtype("u1")
    return np.frombuffer(data, kind, offset=1).astype(kind.newbyteorder("="))


def _dense(hashes: Sketch) -> Sketch:
    register = (hashes >> np.uint64(64 - BITS)).astype(np.int64)
    rest = hashes & np.uint64((1 << (64 - BITS)) - 1)
    # A double holds 53 bits exactly, so its exponent is the place of the highest bit.
    highest = np.frexp(rest.astype(np.float64))[1]
    registers = np.zeros(REGISTERS, np.uint8)
    np.maximum.at(registers, register, (_RANK_MAX - highest).astype(np.uint8))
    return registers


def _sigma(x: float) -> float:
    if x == 1.0:
        return math.inf
    y, z = 1.0, x
    while True:
        x *= x
        before = z
        z += x * y
        y += y
        if z == before:
            return z


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    y, z = 1.0, 1 - x
    while True:
        x = math.sqrt(x)
        before = z
        y *= 0.5
        z -= (1 - x) ** 2 * y
        if z == before:
            return z / 3
