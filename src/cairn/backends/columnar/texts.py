"""Text and binary values side by side in one buffer; a place is the number of a value.

The buffer is an Arrow array that grows, so Arrow itself copies values out of it, and none becomes a
Python object. Values are never removed: the owner makes new texts of those that are in use.

Always true here:
- a value keeps its place; place 0 is the empty value;
- values may be taken on one thread while another adds some: bytes are written before the offsets
  that lead to them, and readers take the offsets first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

MOVED_ROWS = 256 * 1024
"""Values that are moved to new texts at once."""


class Texts:
    """Values of one type, `string` or `binary`."""

    def __init__(self, type: pa.DataType) -> None:
        self._type = type
        self._large = pa.large_string() if pa.types.is_string(type) else pa.large_binary()
        self._data: Array = np.empty(1024, np.uint8)
        self._offsets: Ints = np.zeros(1024, np.int64)
        self._count = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all values and their offsets."""
        return int(self._offsets[self._count]) + 8 * self._count

    def size_of(self, places: Ints) -> int:
        """Return the bytes that these values and their offsets take."""
        offsets = self._offsets
        return int((offsets[places + 1] - offsets[places]).sum()) + 8 * len(places)

    def add(self, array: pa.Array) -> Ints:
        """Return the places of new values."""
        count = len(array)
        first, end = self._count, self._count + count
        _, offsets_buffer, data_buffer = array.buffers()
        if not count or offsets_buffer is None:
            return np.zeros(count, np.int64)
        given = np.frombuffer(offsets_buffer, np.int32, array.offset + count + 1)[array.offset :]
        start, stop = int(given[0]), int(given[-1])
        used = int(self._offsets[first])
        if stop > start:
            self._data = _room(self._data, used, used + stop - start)
            self._data[used : used + stop - start] = np.frombuffer(data_buffer, np.uint8, stop)[
                start:
            ]
        offsets = _room(self._offsets, first + 1, end + 1)
        np.add(given[1:], used - start, out=offsets[first + 1 : end + 1], dtype=np.int64)
        self._offsets, self._count = offsets, end
        return np.arange(first, end)

    def take(self, places: Ints, valid: pa.Buffer | None) -> pa.Array:
        """Return the values at these places, with this validity."""
        # In this order: the offsets may be newer than the count, and the bytes newer than both.
        count, offsets = self._count, self._offsets
        if len(places) and (np.diff(places) == 1).all():
            return self._slice(offsets[places[0] : places[-1] + 2], valid)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._data)]
        # Arrow makes room for values of the mean length, so what lies behind the last is left out.
        held = pa.Array.from_buffers(self._large, count, buffers)
        taken = held.take(pa.array(places)).cast(self._type)
        if valid is None:
            return taken
        return pa.Array.from_buffers(self._type, len(taken), [valid, *taken.buffers()[1:]])

    def _slice(self, offsets: Ints, valid: pa.Buffer | None) -> pa.Array:
        """Return values side by side, without a copy of their bytes: these never change."""
        data = self._data[offsets[0] : offsets[-1]]
        if len(data) >= 1 << 31:
            raise pa.ArrowInvalid(f"{len(data)} bytes do not fit into one array of {self._type}")
        plain = (offsets - offsets[0]).astype(np.int32)
        buffers = [valid, pa.py_buffer(plain), pa.py_buffer(data)]
        return pa.Array.from_buffers(self._type, len(plain) - 1, buffers)


def _room(array: Array, used: int, size: int) -> Array:
    """Return the array, or a longer copy of what is used, with room for `size` items."""
    if size <= len(array):
        return array
    longer = np.empty(max(size, len(array) * 3 // 2), array.dtype)
    longer[:used] = array[:used]
    return longer
