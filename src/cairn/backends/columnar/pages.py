"""The content of rows, in pages: Arrow arrays that never change.

Content that is added keeps its page. So rows are put together, sorted and dropped by their places,
without a copy of their texts.

Always true here:
- the place of a row counts through all pages;
- pages that are joined are of bounded size, so that a row is copied a few times at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints

PAGE_ROWS = 64 * 1024
PAGE_BYTES = 16 << 20
"""Pages are joined up to this size."""

Bools = npt.NDArray[np.bool_]


class Pages:
    """Rows of one type."""

    def __init__(self, arrays: Sequence[pa.StructArray]) -> None:
        self.arrays = list(arrays)
        self._ends: Ints = np.cumsum([len(array) for array in self.arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.arrays else 0

    def take(self, at: Ints, is_null: Bools | None = None) -> pa.StructArray:
        """Return the rows at these places; null where `is_null`, whatever the place there."""
        return _take(self.arrays, self._ends, at, is_null)

    def take_field(self, name: str, at: Ints) -> pa.Array:
        """Return one field of the rows at these places."""
        return _take([array.field(name) for array in self.arrays], self._ends, at, None)

    def pack(self, at: Ints) -> tuple[Pages, Ints]:
        """Return pages without most of the rows that are not at these places, and the new places.

        Rows at two places must differ.
        """
        if 4 * len(at) > 3 * len(self):
            return self, at
        order, bounds = _by_page(self._ends, at)
        arrays, places, start = [], np.empty(len(at), np.int64), 0
        firsts = [0, *self._ends[:-1].tolist()]
        for array, first, low, high in zip(
            self.arrays, firsts, bounds[:-1], bounds[1:], strict=True
        ):
            mine = order[low:high]
            if not len(mine):
                continue
            if 4 * len(mine) > 3 * len(array):
                places[mine] = at[mine] + (start - first)
            else:
                array = array.take(pa.array(at[mine] - first))
                places[mine] = np.arange(start, start + len(mine))
            arrays.append(array)
            start += len(array)
        return Pages(arrays), places


def join_pages(parts: Iterable[Pages]) -> Pages:
    """Return all pages one after the other; small neighbours are copied into one."""
    arrays: list[pa.StructArray] = []
    few: list[pa.StructArray] = []
    rows = size = 0
    for array in (array for part in parts for array in part.arrays):
        array_bytes = array.nbytes
        if few and (rows + len(array) > PAGE_ROWS or size + array_bytes > PAGE_BYTES):
            arrays.append(_concat(few))
            few, rows, size = [], 0, 0
        few.append(array)
        rows += len(array)
        size += array_bytes
    return Pages([*arrays, _concat(few)] if few else arrays)


def _by_page(ends: Ints, at: Ints) -> tuple[Ints, list[int]]:
    """Return the indices of `at` by page, and where those of each page begin and end."""
    pages = np.searchsorted(ends, at, "right")
    order = np.argsort(pages.astype(np.int16) if len(ends) < 1 << 15 else pages, kind="stable")
    counts = np.bincount(pages, minlength=len(ends))
    return order, [0, *np.cumsum(counts).tolist()]


def _take(arrays: Sequence[pa.Array], ends: Ints, at: Ints, is_null: Bools | None) -> pa.Array:
    if len(arrays) == 1:
        return arrays[0].take(pa.array(at, mask=is_null))
    wanted = np.arange(len(at)) if is_null is None else np.flatnonzero(~is_null)
    order, bounds = _by_page(ends, at[wanted])
    chosen = wanted[order]
    read = [page for page in range(len(arrays)) if bounds[page] < bounds[page + 1]]
    if not read:
        return pa.nulls(len(at), arrays[0].type)
    firsts = np.concatenate([[0], ends])
    places = np.zeros(len(at), np.int64)
    if len(read) == 1 or 2 * len(wanted) > sum(len(arrays[page]) for page in read):
        # A copy of whole pages costs less than one of single rows.
        shifts, start = np.zeros(len(arrays), np.int64), 0
        for page in read:
            shifts[page] = start - firsts[page]
            start += len(arrays[page])
        places[chosen] = at[chosen] + np.repeat(shifts, np.diff(bounds))
        return _concat([arrays[page] for page in read]).take(pa.array(places, mask=is_null))
    whole = _concat(
        [
            arrays[page].take(pa.array(at[chosen[bounds[page] : bounds[page + 1]]] - firsts[page]))
            for page in read
        ]
    )
    if is_null is None and (order[1:] > order[:-1]).all():
        return whole
    places[chosen] = np.arange(len(chosen))
    return whole.take(pa.array(places, mask=is_null))


def _concat(arrays: Sequence[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(list(arrays))
