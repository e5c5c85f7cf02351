"""Numbers of texts that do not fit into two integers.

A text is found by a hash of 64 bits, and then compared. The few that share the hash of another one
have a dict, and so have texts of more than HASHED_BYTES_MAX: a step of the hash is a numpy call
per eight bytes, for all texts that are as long.

Always true here:
- equal texts have equal numbers, and others have not;
- a number is the place of the text, or negative for one in the dict; -1 means that there is none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.columnar.int_index import FIRST, IntIndex, Ints, Names, mix
from cairn.backends.columnar.texts import Texts

BYTE_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64).view(np.int64)
HASHED_BYTES_MAX = 1024
_NONE = -1


class LongTexts:
    """Texts of one type, each once."""

    def __init__(self, type: pa.DataType) -> None:
        self._type = type
        self._texts = Texts(type)
        self._index = IntIndex(1)
        self._others: dict[bytes, int] = {}
        self._other_values: list[bytes] = []
        self._other_bytes = 0

    @property
    def nbytes(self) -> int:
        """Approximate bytes of all texts and their numbers."""
        return self._texts.nbytes + 3 * 8 * self._index.count + self._other_bytes

    def number(
        self, array: pa.Array, starts: Ints, lengths: Ints, words: Ints, *, add: bool
    ) -> Ints:
        """Return the number of each text; with `add`, new texts get one.

        `words` has the eight bytes from any place on, and `starts` and `lengths` the places.
        """
        is_hashed = lengths <= HASHED_BYTES_MAX
        lengths = np.where(is_hashed, lengths, 0)
        names = Names([_hash_words(starts, lengths, words)], None)
        positions = self._index.find(names)
        positions[~is_hashed] = _NONE
        if add:
            self._add(array, names, positions, np.flatnonzero((positions < 0) & is_hashed))
        known = np.flatnonzero(positions >= 0)
        if len(known):
            given = array if len(known) == len(array) else array.take(pa.array(known))
            is_same = pc.equal(given, self._texts.take(positions[known] + 1, None))
            clashing = known[~is_same.to_numpy(zero_copy_only=False)]
            positions[clashing] = _NONE
            is_hashed[clashing] = False
        # The empty text has place 0.
        numbers = np.where(positions >= 0, positions + 1, _NONE)
        others = np.flatnonzero(~is_hashed)
        if len(others):
            numbers[others] = self._number_others(array.take(pa.array(others)), add=add)
        return numbers

    def _add(self, array: pa.Array, names: Names, positions: Ints, missing: Ints) -> None:
        if not len(missing):
            return
        placed, firsts = self._index.add(Names([names.columns[0][missing]], None))
        # Texts are added in the order of their positions.
        self._texts.add(array.take(pa.array(missing[firsts])))
        positions[missing] = placed

    def _number_others(self, array: pa.Array, *, add: bool) -> list[int]:
        found = array.cast(pa.binary()).to_pylist()
        numbers, values = self._others, self._other_values
        if add:
            for value in found:
                if value not in numbers:
                    values.append(value)
                    numbers[value] = -1 - len(values)
                    self._other_bytes += len(value)
        return [numbers.get(value, _NONE) for value in found]

    def values(self, numbers: Ints) -> pa.Array:
        """Return the texts with these numbers."""
        found = self._texts.take(np.maximum(numbers, 0), None)
        is_other = numbers < 0
        if not is_other.any():
            return found
        others = [self._other_values[-2 - number] for number in numbers[is_other].tolist()]
        replaced = pa.array(others, pa.binary()).cast(self._type)
        return pc.replace_with_mask(found, pa.array(is_other), replaced)


def _hash_words(starts: Ints, lengths: Ints, words: npt.NDArray[np.int64]) -> Ints:
    """Return a hash of each text, eight bytes at a time."""
    hashes = lengths.view(np.uint64) * FIRST
    rows: Ints | None = None
    for at in range(0, int(lengths.max(initial=0)), 8):
        longer = np.flatnonzero(lengths > at)
        if len(longer) < len(lengths):
            rows = longer if rows is None else rows[longer]
            starts, lengths = starts[longer], lengths[longer]
        word = words[starts + at] & BYTE_MASKS[np.minimum(lengths - at, 8)]
        if rows is None:
            hashes = mix(hashes ^ word.view(np.uint64)) * FIRST
        else:
            hashes[rows] = mix(hashes[rows] ^ word.view(np.uint64)) * FIRST
    return hashes.view(np.int64)
