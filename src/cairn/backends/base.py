"""The contract of a state backend: rows by key group, and bases of them.

A backend gives, for each state and key group, `Rows`: from key to what is held of it (a value;
for map state a mapping of entries, for list state a sequence). It knows nothing of epochs: what
the running epoch changes is kept above it, in `overlay`, the same for every backend, and comes
down as a whole (`promote`) when the epoch is committed.

A base is all of it as of one moment between epochs, written in the background while
later epochs come down. How a backend keeps the two apart is its own affair.

Always true of a backend:
- the rows of different states and groups are disjoint;
- values that went in come out equal;
- everything in it is committed;
- it lives and dies with its slot: durability is the snapshot's work, not the backend's;
- a base holds exactly what was there at `begin_base`, or its `write` raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from cairn.storage.files import StateFile
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store
from cairn.types.codec import Codec

if TYPE_CHECKING:
    from cairn.backends.overlay import Table


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""Stands for "nothing" where None would be a value."""

Content: TypeAlias = Any
"""Everything held of one key: a value, a mapping of entries, or a sequence of items."""
Change: TypeAlias = Any
"""What an epoch changed of one key.

value: the new value, None deletes; map: entry -> value, ABSENT deletes; list: (start, added),
the first `start` items stay and `added` follow.
"""


class BaseCancelledError(Exception):
    """The state was given up for another version while its base was written. Internal."""


class Rows(Protocol):
    """The committed rows of a state in a key group. `rows[key]` (value state) is None for none."""

    def get(self, key: Any, default: Any = None, /) -> Any:
        """What is held of a key. Nobody changes it but `promote`."""

    def peek(self, key: Any, /) -> Any:
        """A copy of what is held of a key, as a plain dict or list; None for nothing.

        From any thread while the rows are read, but not while they are promoted. Nothing is
        remembered of it.
        """

    def __contains__(self, key: Any, /) -> bool: ...

    def __len__(self) -> int:
        """How many keys; an estimate, where counting would cost."""

    def items(self) -> Iterable[tuple[Any, Any]]:
        """Every key with what is held of it, in no particular order."""

    def entry_count(self) -> int:
        """How many stored rows: entries of maps, else keys."""

    def promote(self, changes: Mapping[Any, Any], /) -> None:
        """Take in changes as the overlay holds them. Deleting what is not there is fine.

        value: the new value, None deletes; map: entry -> value, ABSENT deletes;
        list: (start, added), keep so many items, then these.
        """

    def held_many(self, keys: Sequence[Any], /) -> list[Any]:
        """`get` of each."""

    def new_keys(self, keys: Iterable[Any], /) -> list[Any]:
        """Those that are not held; also those of which that is not known without asking a disk."""

    def scan(self, cursor: Any, count: int, /) -> tuple[list[tuple[Any, Any]], Any]:
        """Some of `items`, about `count`, and the cursor for the next ones; None: that was all.

        The first cursor is None. ABSENT for a key whose state must be asked for.
        """

    def compact(self) -> None:
        """Give back memory, if many keys are gone."""


@dataclass(frozen=True)
class BaseTarget:
    """Where a base goes, and what is there already."""

    store: Store
    term: int
    operator: str
    epoch: int
    scratch: str
    inline_bytes_max: int
    known: tuple[FileRef, ...] = ()
    """Bases of the parent epoch for this range: their objects may be shared."""


class Base(ABC):
    """The state as of `begin_base`, on its way to the store."""

    @abstractmethod
    def write(self, target: BaseTarget, pace: Callable[[], None]) -> StateFile:
        """Store it; on a background thread, while later epochs are promoted.

        Calls `pace` after each piece of work of a few milliseconds; it sleeps, or raises
        to give up. Raises BaseCancelledError when the state was dropped meanwhile.
        """

    @abstractmethod
    def close(self) -> None:
        """End the bookkeeping for it, written or not. From any thread, any number of times."""


class Backend(ABC):
    """Holds the state of one operator in one slot."""

    takes_columns: ClassVar[bool] = False
    """Tables may hold their rows themselves, in arrays: its bases take them in."""

    @abstractmethod
    def open_state(
        self, name: str, kind: str, keys: Codec, values: Codec, entries: Codec | None
    ) -> None:
        """Declare a state, before its rows. With other types than before, its rows are dropped."""

    @abstractmethod
    def rows(self, name: str, group_index: int) -> Rows:
        """The rows of a state in a key group, empty at first. The same object until dropped."""

    @abstractmethod
    def drop(self, name: str, group_index: int) -> None:
        """Forget the rows of a state in a key group; the next `rows` starts empty.

        Cancels a base that is being written.
        """

    def prefetch(self, groups: Sequence[int], keys: Sequence[Any]) -> None:
        """These keys are about to be read, each in its key group."""

    @abstractmethod
    def begin_base(self, tables: Mapping[str, Table], groups: range) -> Base:
        """Fix what is there now, to be written. One at a time."""

    def load(self, store: Store, ref: FileRef, groups: range, scratch: str) -> bool:
        """Take these (empty) key groups from a base as it is; False: read its rows and apply them.

        Every state must be open, with rows for the groups.
        """
        return False

    def repack(self, tables: Sequence[Table]) -> bool:
        """Few of many rows of these are left: bring them close together, to free memory.

        Between epochs; False: not now. If it raises, what is held is not to be trusted.
        """
        return True

    def compact(self) -> None:
        """Give back the disk that removed rows took. Takes its time; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and files."""
