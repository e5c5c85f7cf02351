"""The interface of a database that keeps versions of rows: all that a further database writes.

A row is (key group, number of the state, name, epoch, value); a value of None is a deletion. Rows
are not overwritten by later epochs, so any history can be read at any time: a restart, a rollback,
a branch or another parallelism moves nothing. A *place* is the rows of one job: a schema, a prefix,
a table. `VersionedBackend` does the rest: the cache, bases, their index in the checkpoint, and the
choice of what is removed.

Always true of an implementation:
- a look-up or page of a layer has the newest version of each name among the epochs that the layer
  lists, and no other;
- `write` and `finish` of a writing raise FencedError, and change nothing, once a later term, or a
  later epoch of the same term, has claimed one of its key groups of that operator;
- writing the same rows of an epoch again changes nothing;
- what `finish` has confirmed is durable;
- an error of a database that cannot be reached is an EpochError with the fact `is_away`;
- no address, message or repr has a password;
- reads may come from two threads, writes from a third one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from cairn.backends.cached.database import Op
from cairn.backends.cached.described import StoredState
from cairn.errors import EpochError

Address = Mapping[str, str]
"""The place of a database, without secrets. It is stored in the checkpoint."""
Named = tuple[bytes, bytes | None]
"""The name of a row, and its value."""


class FencedError(EpochError):
    """Another slot has written newer rows of these key groups. Internal."""


class Epochs(msgspec.Struct, frozen=True, array_like=True):
    """Epochs that one leader committed. Those in between that have rows count too."""

    first: int
    last: int
    term: int


class Layer(msgspec.Struct, frozen=True, array_like=True):
    """Epochs of a job whose rows count."""

    schema: str
    """The place of the job."""
    epochs: tuple[Epochs, ...]

    def lists(self, epoch: int) -> bool:
        return any(each.first <= epoch <= each.last for each in self.epochs)


class Writing(NamedTuple):
    """A change of key groups of an operator, to the rows of an epoch."""

    operator: str
    groups: tuple[int, ...]
    term: int
    epoch: int

    def is_behind(self, claims: Iterable[tuple[int, int]]) -> bool:
        """True if one of these claims, each a term and its newest epoch, keeps it out."""
        return any(
            term > self.term or (term == self.term and epoch > self.epoch) for term, epoch in claims
        )

    def fence_error(self) -> FencedError:
        return FencedError(
            f"operator {self.operator!r}: another slot has written newer rows of these key "
            f"groups to the database; those of term {self.term} up to epoch {self.epoch} "
            "are not written"
        )


class Range(NamedTuple):
    """States and key groups of an operator."""

    operator: str
    states: tuple[int, ...]
    groups: tuple[int, ...]


class VersionStore(ABC):
    """The rows of a job, and those of the jobs that it is a branch of."""

    kind: str
    """The name of the database in the registry (`versioned.kinds`)."""
    address: Address
    place: str

    @property
    @abstractmethod
    def where(self) -> str:
        """The address for people."""

    # Reading

    @abstractmethod
    def look_up(self, layer: Layer, keys: Sequence[bytes]) -> Sequence[tuple[int, bytes | None]]:
        """Return (index in `keys`, value) of each key that the layer has a row of.

        A key is the key group, the number of the state (both in `cached.numbers.PREFIX`) and the
        name.
        """

    @abstractmethod
    def read_page(
        self, layer: Layer, group: int, state: int, low: bytes, high: bytes | None, count: int
    ) -> Sequence[Named]:
        """Return the first `count` names from `low` on and below `high`, deleted ones too."""

    def read_pages(
        self, layer: Layer, starts: Sequence[tuple[int, int, bytes]], count: int
    ) -> list[Sequence[Named]]:
        """Return a page of each (key group, state, low). Values need only be None or not."""
        return [self.read_page(layer, *start, None, count) for start in starts]

    # Writing

    @abstractmethod
    def claim(self, writing: Writing, states: Mapping[str, StoredState]) -> Mapping[int, int]:
        """Keep older writers of these key groups out from now on. Make what the rows need.

        Return the newest epoch that each key group was claimed for before, of any term. There may
        be rows of it that nobody finished. Key groups that were never claimed may be left out.
        """

    @abstractmethod
    def write(self, writing: Writing, ops: Sequence[Op]) -> None:
        """Write rows of the epoch: at most a few thousand, all or none of them."""

    @abstractmethod
    def finish(self, writing: Writing, visible: Mapping[int, Mapping[int, Layer]]) -> None:
        """Note that all rows of the epoch are here, durably.

        `visible` has the layer that counts now, by state and key group: for views of others.
        """

    # Keeping house

    @abstractmethod
    def find_missing(self, place: str, operator: str, groups: Sequence[int]) -> str:
        """Return which key groups of a place no writing has claimed; empty if none."""

    @abstractmethod
    def list_epochs(self, part: Range, end: int) -> list[int]:
        """Return the epochs up to `end` that have rows and are not noted as collected, in order."""

    @abstractmethod
    def remove_older(self, part: Range, epoch: int, *, with_deletions: bool) -> int:
        """Remove versions before the epoch of names that have one of it, and its deletions."""

    @abstractmethod
    def remove_epoch(self, part: Range, epoch: int) -> int:
        """Remove the versions of an epoch."""

    @abstractmethod
    def note_collected(self, part: Range, epoch: int) -> None:
        """Note that nothing up to this epoch is left to remove."""

    @abstractmethod
    def remove_states(self, kept: Sequence[int], before: int) -> int:
        """Remove rows, of before an epoch, of states other than these."""

    @abstractmethod
    def drop(self) -> None:
        """Remove everything of the place. Fine if there is nothing."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True)
class Kind:
    """A kind of database, as the registry has it."""

    name: str
    schemes: tuple[str, ...]
    """Begins of its URLs: `postgresql`, …"""
    address_of: Callable[[str], dict[str, str]]
    """Return the address in a URL, and remember its secrets. Refuses what cannot be read."""
    open: Callable[[Address, str, str], VersionStore]
    """Open a place at an address; the text names the connections. Connects when it must."""


def place_of(job_id: str) -> str:
    """Return the name of a job's rows."""
    return f"cairn_{job_id.lower()}"
