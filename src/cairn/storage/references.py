"""Count what epochs reference, by what changes from one epoch to the next.

A large job has very many files, of which an epoch changes few. Counting all of them in every epoch
would cost the driver more than all else it does.

Always true here:
- a key was last referenced by the last epoch that lists it, whatever lies between;
- a file that two epochs list at the same place of a range costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from cairn.storage.manifest import Epoch, FileRef

K = TypeVar("K")


class References(Generic[K]):
    """Keys that the epochs so far list."""

    def __init__(self) -> None:
        self._listed: dict[K, int] = {}
        """Listings in the newest epoch: a file may be in several ranges."""
        self._left: dict[K, int] = {}
        """The last epoch that lists a key, of those that the newest one does not list."""

    def __contains__(self, key: K) -> bool:
        return key in self._listed or key in self._left

    def __iter__(self) -> Iterator[K]:
        return itertools.chain(self._listed, self._left)

    def advance(self, added: Iterable[K], removed: Iterable[K], before: int) -> None:
        """Count one more epoch, by its changes since the one with the number `before`.

        A key may be added and removed as often: then it stays.
        """
        listed, left = self._listed, self._left
        for key in added:
            listed[key] = listed.get(key, 0) + 1
            left.pop(key, None)
        for key in removed:
            count = listed[key] - 1
            if count:
                listed[key] = count
            else:
                del listed[key]
                left[key] = before

    def drop_before(self, end: int) -> list[K]:
        """Forget the keys that no epoch from `end` on lists, and return them.

        The newest epoch is not before `end`.
        """
        gone = [key for key, last in self._left.items() if last < end]
        for key in gone:
            del self._left[key]
        return gone


def files_of(epoch: Epoch) -> Iterator[FileRef]:
    """Yield every file of an epoch, once for each range or source that lists it."""
    for files in _lists_of(epoch).values():
        for each in files:
            yield from each


def changes(before: Epoch | None, after: Epoch) -> tuple[list[FileRef], list[FileRef]]:
    """Return the files that an epoch lists and another one did not, and those it lists no more.

    A file may be in both: of a range, all files from the first difference on are returned.
    """
    added: list[FileRef] = []
    removed: list[FileRef] = []
    old = {} if before is None else _lists_of(before)
    new = _lists_of(after)
    for key in {**old, **new}:
        nothing: list[FileRef] = []
        ranges = old.get(key, ()), new.get(key, ())
        for was, now in itertools.zip_longest(*ranges, fillvalue=nothing):
            # Nearly always: one delta more.
            if now[: len(was)] == was:
                added += now[len(was) :]
            else:
                same = 0
                for one, other in zip(was, now, strict=False):
                    if one is not other and one != other:
                        break
                    same += 1
                added += now[same:]
                removed += was[same:]
    return added, removed


def _lists_of(epoch: Epoch) -> dict[str | int, list[list[FileRef]]]:
    """Return the files of each range by uid, and those of each source by index."""
    found: dict[str | int, list[list[FileRef]]] = {
        uid: [each.files for each in operator.ranges] for uid, operator in epoch.operators.items()
    }
    return found | {index: [log.chunks] for index, log in epoch.spark.logs.items()}


__all__ = ["References", "changes", "files_of"]
