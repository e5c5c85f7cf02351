"""Count the rows of an epoch by key group, and find the keys that have most of them.

Key groups are counted, in at most BUCKETS_MAX buckets of neighbouring groups. Keys are counted
exactly while an epoch is small; of a larger one a sample of rows is kept, of about SAMPLE_ROWS,
drawn at random, so that an order in the rows (round robin, say) does not make a key look hot.

Always true here:
- the cost of keys does not grow with the rows of an epoch, but for a random draw per batch;
- nothing that is stored as state depends on it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from cairn.protocol.letters import json_text
from cairn.protocol.spec import InletSpec, lane_name
from cairn.types.codec import codec

BUCKETS_MAX: Final = 128
SAMPLE_ROWS: Final = 1024
"""The sample grows to twice this number before it is thinned."""
HOT_KEYS_MAX: Final = 5
HOT_SHARE_MIN: Final = 0.01
"""Keys with a smaller share of a subtask's rows are not reported."""
HOT_ROWS_MIN: Final = 2
KEY_CHARS_MAX: Final = 64


def bucket_groups(group_count: int) -> int:
    """Return the number of neighbouring key groups in a bucket; the last one may have fewer."""
    return -(-group_count // BUCKETS_MAX)


def bucket_rows(groups: np.ndarray[Any, Any]) -> list[Any]:
    """Sum rows per key group into at most BUCKETS_MAX buckets of equally many groups."""
    firsts = np.arange(0, len(groups), bucket_groups(len(groups)))
    return np.add.reduceat(groups, firsts).tolist()  # type: ignore[no-any-return]


def bucket_count(group_count: int) -> int:
    """Return the number of buckets of all key groups."""
    return -(-group_count // bucket_groups(group_count))


def cut_zeros(rows: Sequence[int]) -> tuple[int, list[int]]:
    """Return the first bucket with rows, and the rows from there to the last one with any."""
    used = [bucket for bucket, count in enumerate(rows) if count]
    return (used[0], list(rows[used[0] : used[-1] + 1])) if used else (0, [])


class Heat:
    """The rows of the epoch at hand, of one operator with keys in one subtask."""

    def __init__(self, inlets: Sequence[InletSpec], group_count: int) -> None:
        self._inlets = inlets
        self._group_count = group_count
        self._codecs = [[codec(i.schema.field(name).type) for name in i.keys] for i in inlets]
        self._random = np.random.default_rng(0)
        self.reset()

    def reset(self) -> None:
        """An attempt begins."""
        self._groups = np.zeros(self._group_count, np.int64)
        self._sample: list[tuple[int, pa.Array]] = []
        """Rows of an input, by its number."""
        self._sampled = 0
        self._rows = 0
        self._share = 1.0
        """Number of rows in the sample."""

    def add(self, groups: pa.Array, rows: pa.StructArray) -> None:
        """Count some rows and sample their keys."""
        places = groups.to_numpy().astype(np.int64)  # bincount would cast them too, but slower.
        self._groups += np.bincount(places, minlength=self._group_count)
        self._rows += len(rows)
        if self._share == 1.0 and self._sampled + len(rows) <= 2 * SAMPLE_ROWS:
            drawn = None
        else:
            if self._share == 1.0:
                self._share = min(1.0, SAMPLE_ROWS / self._rows)
                self._thin(self._share)
            drawn = self._draw(len(rows), self._share)
        if drawn is None or len(drawn):
            self._keep(rows, drawn)
        while self._sampled > 2 * SAMPLE_ROWS:
            self._share /= 2
            self._thin(0.5)

    def _draw(self, count: int, share: float) -> np.ndarray[Any, Any]:
        """Draw this share of `count` places at random; a place may come twice."""
        wanted = int(count * share + self._random.random())
        return (self._random.random(wanted) * count).astype(np.int64)

    def _keep(self, rows: pa.StructArray, places: np.ndarray[Any, Any] | None) -> None:
        """Only the key columns: what is not kept can be freed."""
        if not self._inlets[0].name:
            self._keep_of(0, rows, places)
            return
        if places is not None:
            rows = rows.take(pa.array(places))
        lanes = rows.field("lane").to_numpy()
        for index, inlet in enumerate(self._inlets):
            assert inlet.lane is not None, "connected inputs have lanes"
            theirs = np.flatnonzero(lanes == inlet.lane)
            if len(theirs):
                self._keep_of(index, rows.field(lane_name(inlet.lane)), theirs)

    def _keep_of(
        self, index: int, rows: pa.StructArray, places: np.ndarray[Any, Any] | None
    ) -> None:
        columns = [rows.field(name) for name in self._inlets[index].keys]
        if places is not None:
            taken = pa.array(places)
            columns = [column.take(taken) for column in columns]
        # By number: key columns of connected inputs have different names.
        names = [str(at) for at in range(len(columns))]
        kept = pa.StructArray.from_arrays(columns, names=names)
        self._sample.append((index, kept))
        self._sampled += len(kept)

    def _thin(self, share: float) -> None:
        """Keep this share of the sample."""
        parts: dict[tuple[int, pa.DataType], list[pa.Array]] = {}
        for index, keys in self._sample:
            parts.setdefault((index, keys.type), []).append(keys)
        self._sample.clear()
        for (index, _), some in parts.items():
            keys = pa.concat_arrays(some)
            places = np.flatnonzero(self._random.random(len(keys)) < share)
            self._sample.append((index, keys.take(pa.array(places))))
        self._sampled = sum(len(keys) for _, keys in self._sample)

    def group_rows(self) -> list[int]:
        """Rows per bucket of key groups."""
        return bucket_rows(self._groups)

    def hot_keys(self) -> list[tuple[str, int]]:
        """The keys with most rows and about how many, most first."""
        counted: Counter[Any] = Counter()
        for index, keys in self._sample:
            parts = zip(self._codecs[index], keys.flatten(), strict=True)
            counted.update(zip(*(each.decode_keys(column) for each, column in parts), strict=True))
        scale = self._rows / self._sampled if self._sampled else 1.0
        least = max(HOT_ROWS_MIN, HOT_SHARE_MIN * self._rows)
        return [
            (_text(key), round(count * scale))
            for key, count in counted.most_common(HOT_KEYS_MAX)
            # One row of a sample is chance, however many it stands for.
            if count >= HOT_ROWS_MIN and count * scale >= least
        ]


def hottest(keys: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the hottest keys of several subtasks or batches, with their rows added up."""
    counted: Counter[str] = Counter()
    for key, rows in keys:
        counted[key] += rows
    return counted.most_common(HOT_KEYS_MAX)


def _text(key: tuple[Any, ...]) -> str:
    """As it is looked up: the value, or a JSON array of several. A long one is cut short."""
    if key == (None,):
        return "[null]"  # Not to be taken for the text "null".
    text = json_text(key[0] if len(key) == 1 else list(key))
    if text.startswith('"'):
        text = json.loads(text)
    if len(text) <= KEY_CHARS_MAX:
        return text
    # Two long keys that begin alike are two.
    code = hashlib.blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()
    return f"{text[: KEY_CHARS_MAX - 1 - len(code)]}…{code}"


__all__ = ["HOT_KEYS_MAX", "Heat", "bucket_groups", "bucket_rows", "hottest"]
