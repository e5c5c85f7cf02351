"""The contract of a state backend: rows by key group, and bases of them.

A backend has `Rows` for each state and key group: a mapping from key to content (a value, the
entries of a map, the items of a list). It has no notion of epochs: the changes of the running
epoch lie above it, in `overlay`, the same for every backend, and are promoted into it as a whole
when the epoch is committed.

A base is the whole state as of one moment between epochs. A background thread writes it while
later epochs are promoted; each backend keeps the two apart in its own way.

Always true of a backend:
- the rows of different states and groups are disjoint;
- values come back equal;
- everything in it is committed;
- it lives and dies with its slot: the snapshot is durable, the backend need not be;
- a base holds exactly the state at `begin_base`, or its `write` raises.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from cairn.storage.files import StateFile
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store
from cairn.types.codec import Codec, Key

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
"""The change of one key in an epoch.

value: the new value, None deletes; map: entry -> value, ABSENT deletes; list: (start, added),
the first `start` items stay and `added` follow.
"""
Cursor: TypeAlias = bytes
"""The place where a scan of rows goes on."""


class BaseCancelledError(Exception):
    """The slot dropped the state while its base was being written. Internal."""


class Rows(Protocol):
    """The committed rows of a state in a key group. `rows[key]` (value state) is None for none."""

    def get(self, key: Key, default: Content = None, /) -> Content:
        """Return the content of a key. Only `promote` changes it."""

    def peek(self, key: Key, /) -> Content:
        """Return a copy of a key's content, as a plain dict or list; None for nothing.

        From any thread while the rows are read, but not while they are promoted. Caches
        stay as they are.
        """

    def __contains__(self, key: Key, /) -> bool: ...

    def __len__(self) -> int:
        """Return the number of keys; an estimate if counting would be expensive."""

    def items(self) -> Iterable[tuple[Key, Content]]:
        """Return every key with its content, in no particular order."""

    def entry_count(self) -> int:
        """Return the number of stored rows: entries of maps, else keys."""

    def promote(self, changes: Mapping[Key, Change], /) -> None:
        """Apply changes as the overlay holds them. Deleting a missing key is fine."""

    def restore(self, changes: Mapping[Key, Change], /) -> None:
        """Apply changes that were read from a file, as `promote` does. Nothing need be read for it:
        by how much they raise the counts may be found out later.
        """

    def get_many(self, keys: Sequence[Key], /) -> list[Content]:
        """Return the content of each key."""

    def new_keys(self, keys: Iterable[Key], /) -> list[Key]:
        """Return the keys that are not held, and those that only a disk could tell."""

    def scan(
        self, cursor: Cursor | None, count: int, /
    ) -> tuple[list[tuple[Key, Content]], Cursor | None]:
        """Return about `count` of the items, and the cursor of the next ones; None at the end.

        The first cursor is None. The content is ABSENT if it must be read with `get_many`.
        """

    def compact(self) -> None:
        """Release memory, if many keys are gone."""


@dataclass(frozen=True)
class BaseTarget:
    """The store that a base is written to, and the objects it may share there."""

    store: Store
    term: int
    operator: str
    epoch: int
    scratch: str
    inline_bytes_max: int
    known: tuple[FileRef, ...] = ()
    """Bases of the parent epoch for this range, whose objects may be shared."""
    epoch_term: int | None = None
    """The term of the leader that committed the epoch; None: it is `term`."""
    epoch_nonce: str = ""
    """Names the manifest of the epoch, also among copies of the checkpoint."""
    is_awaited: bool = False
    """An epoch waits for this base. Others may be left to a later epoch."""


@dataclass(frozen=True)
class Origin:
    """The epoch that state is restored to, and who restores it."""

    term: int
    epoch: int
    """The epoch that begins."""
    follows: bool
    """True: for a standby, beside the slots of the leader."""
    descends_from: Callable[[int, str], bool]
    """True if the state descends from the epoch with this number and nonce, or is of it."""


class Applying(Protocol):
    """Committed changes on their way to a database that has one version."""

    def apply(self, term: int, epoch: int, nonce: str, pace: Callable[[], None]) -> None:
        """Make its rows those of an epoch, on a background thread."""

    def close(self) -> None:
        """End its bookkeeping, applied or not. From any thread, any number of times."""


class Base(ABC):
    """The state as of `begin_base`, being written to the store."""

    @abstractmethod
    def write(self, target: BaseTarget, pace: Callable[[], None]) -> StateFile:
        """Store it, on a background thread, while later epochs are promoted.

        Calls `pace` after each piece of work of a few milliseconds; it sleeps, or raises
        to stop. Raises BaseCancelledError if the state was dropped meanwhile.
        """

    @abstractmethod
    def close(self) -> None:
        """End its bookkeeping, written or not. From any thread, any number of times."""


class Backend(ABC):
    """Holds the state of one operator in one slot."""

    takes_columns: ClassVar[bool] = False
    """Tables may hold their rows themselves, in arrays; bases include those."""
    spills_columns: ClassVar[bool] = False
    """Tables of batches are in arrays, as far as memory goes; the backend takes the other rows."""
    orders_times: ClassVar[bool] = False
    """Timers, and when keys are due, are stored by time: the next are found without a scan."""

    @abstractmethod
    def open_state(
        self, name: str, kind: str, keys: Codec, values: Codec, entries: Codec | None
    ) -> None:
        """Declare a state before its rows are used. If its types changed, its rows are dropped."""

    @abstractmethod
    def rows(self, name: str, group_index: int) -> Rows:
        """Return the rows of a state in a key group: the same object until it is dropped."""

    @abstractmethod
    def drop(self, name: str, group_index: int) -> None:
        """Remove the rows of a state in a key group; the next `rows` starts empty.

        Cancels a base that is being written.
        """

    def prefetch(self, groups: Sequence[int], keys: Sequence[Key]) -> None:
        """Prepare to read these keys, each in its key group."""

    def read_ahead(self, groups: Sequence[int], keys: Sequence[Key]) -> None:
        """Begin to read these keys on another thread. Nothing else is promoted or dropped before
        `prefetch` was called with the same keys, or `drop_ahead`."""

    def drop_ahead(self) -> None:
        """Forget the keys that are being read ahead."""

    def prepare_promote(self, name: str, changes: Mapping[int, Mapping[Key, Change]]) -> None:
        """Prepare to promote these changes of a state, by key group."""

    def prepare_restore(self, name: str, changes: Mapping[int, Mapping[Key, Change]]) -> None:
        """Prepare to restore these changes of a state, by key group."""

    def is_settled(self) -> bool:
        """True if a base can begin without a look at rows that were restored."""
        return True

    def is_short_of_memory(self) -> bool:
        """True if changes that a base is to write take more memory than they may. On any thread."""
        return False

    def unwritten_bytes(self, *, with_frozen: bool) -> int:
        """Estimate the memory of changes that no writer has written to a database outside.

        `with_frozen`: those too that a writer has now, or had when it failed.
        """
        return 0

    @property
    def unwritten_bytes_max(self) -> int:
        """Limit of `unwritten_bytes`: at this size, changes must not get more."""
        return sys.maxsize

    @abstractmethod
    def begin_base(self, tables: Mapping[str, Table], groups: range) -> Base:
        """Fix the present state, to be written. One base at a time."""

    def load(self, store: Store, ref: FileRef, groups: range) -> bool:
        """Use the files of a base as they are for these empty key groups.

        Every state must be open, with rows for the groups. False if the caller must read the
        rows and apply them instead.
        """
        return False

    def begin_restore(self, origin: Origin) -> None:
        """Prepare to load bases, for key groups that are empty."""

    def is_lost(self) -> bool:
        """True if a database has lost rows that it was given: they are to be restored."""
        return False

    def has(self, ref: FileRef, groups: range) -> bool:
        """True if loading a base has brought the changes of this delta too."""
        return False

    def wants_apply(self) -> bool:
        """True if committed changes are to be applied. Called once per epoch, at its begin."""
        return False

    def begin_apply(self, groups: range) -> Applying:
        """Fix the present changes, to be applied. Not while a base is written."""
        raise AssertionError("a backend without a database of one version")

    def repack(self, tables: Sequence[Table]) -> bool:
        """Move the few remaining rows of these tables close together, to free memory.

        Called between epochs; False if not possible now. After an exception the rows are
        not to be trusted.
        """
        return True

    def compact(self) -> None:
        """Release the disk space of removed rows. Slow; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and files."""
