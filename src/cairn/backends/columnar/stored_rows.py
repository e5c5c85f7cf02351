"""The rows of a columnar table as deltas and bases store them.

Always true here:
- rows are ordered by key group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.columnar.key_index import NameIndex


def make_rows(
    groups: npt.NDArray[np.integer],
    names: Sequence[pa.Array],
    values: pa.Array,
    is_live: npt.NDArray[np.bool_] | None = None,
) -> pa.RecordBatch:
    """Return rows as they are stored: names are keys, or keys and entries; all are live or some."""
    live = np.ones(len(groups), np.bool_) if is_live is None else is_live
    return pa.RecordBatch.from_pydict(
        {
            "group": pa.array(groups.astype(np.int32)),
            **dict(zip(("key", "entry"), names, strict=False)),
            "value": values,
            "live": pa.array(live),
        }
    )


def merge_names(
    rows: pa.RecordBatch, index: NameIndex, names: Callable[[pa.RecordBatch], list[pa.Array]]
) -> pa.RecordBatch:
    """Return the last of the stored rows of each name, by key group. `index` is empty."""
    positions, _ = index.place(names(rows))
    last = np.empty(len(index), np.int64)
    last[positions] = np.arange(len(positions))
    order = np.argsort(rows["group"].to_numpy()[last], kind="stable")
    return rows.take(pa.array(last[order]))


__all__ = ["make_rows", "merge_names"]
