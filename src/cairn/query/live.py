"""Look up state of a running job by key, as of its last committed epoch, in the slots.

A query takes the newest committed epoch and asks each slot for the version that the epoch names.
A slot that is at a later version, or has lost it, refuses: the query then starts again with the
epoch committed by now. State that no slot has is read from the checkpoint, at that same epoch.

Always true here:
- an answer is of one epoch, and that epoch is in the log;
- answers to repeated queries never go back to an earlier epoch;
- no slot is started, and no epoch waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import pyarrow as pa

from cairn.backends.contract import ABSENT
from cairn.backends.packing import unpack_held
from cairn.errors import CairnError, EpochError, QueryError, RestoreError
from cairn.functions import find_states
from cairn.protocol.lookups import LookupReply, LookupRequest
from cairn.protocol.spec import OperatorSpec
from cairn.query.lookups import Folds, Held, Key, Lookup, Place, Value
from cairn.snapshots.reader import EpochReader
from cairn.state import Aggregating
from cairn.storage.manifest import Epoch

if TYPE_CHECKING:
    from cairn.driver.coordinator.epoch import Coordinator

Source = Literal["slot", "checkpoint"]

TRIES_MAX: Final = 4
READERS_MAX: Final = 4
"""Readers of the checkpoint at once."""
KEYS_MAX: Final = 100_000
"""Keys in one query."""


class Answer(NamedTuple):
    """State of one key, as of an epoch."""

    value: Value
    """As `get()` of the state returns it; a dict for a map; None if not found."""
    epoch: int
    found: bool
    source: Source


@dataclass(frozen=True)
class Answers:
    """State of many keys, all of it as of one epoch."""

    epoch: int
    values: Held
    """By key as given (a list becomes a tuple); keys without state are left out."""
    source: Source
    """"slot" if none of it had to be read from the checkpoint."""


Asking = Callable[[Mapping[int, LookupRequest]], Mapping[int, LookupReply]]
"""Questions by subtask; of a slot that does not answer there is nothing."""


class LiveState:
    """Answers queries for the state of one run."""

    def __init__(self, leader: Coordinator, group_count: int, ask: Asking, *, job: str) -> None:
        self._leader = leader
        self._group_count = group_count
        self._ask = ask
        self._job = job
        self._lookups: dict[tuple[str, str], Lookup] = {}
        self._results: dict[
            tuple[str, str], tuple[OperatorSpec, Aggregating[Value, Value] | None]
        ] = {}
        self._readers: list[EpochReader] = []
        """Readers of one epoch in the checkpoint that are free at the moment."""
        self._lock = threading.Lock()
        self._reading = threading.BoundedSemaphore(READERS_MAX)
        self._is_closed = False

    def query(self, operator: str, state: str, key: Key) -> Answer:
        """State of one key."""
        lookup, found, source = self._look_up(operator, state, [key])
        (value,) = found
        if value is ABSENT:
            return Answer(None, lookup.epoch.number, False, source)
        return Answer(value, lookup.epoch.number, True, source)

    def query_many(self, operator: str, state: str, keys: Iterable[Key]) -> Answers:
        """State of many keys, all of it as of one epoch."""
        keys = list(keys)
        if len(keys) > KEYS_MAX:
            raise QueryError(
                f"{len(keys)} keys are asked for at once, at most {KEYS_MAX} are answered\n"
                "  next: ask for fewer, or read the state as a table with cairn.read_state(...)",
                operator=operator,
                state=state,
            )
        lookup, found, source = self._look_up(operator, state, keys)
        pairs = zip(keys, found, strict=True)
        values = {lookup.hashable(k): value for k, value in pairs if value is not ABSENT}
        return Answers(lookup.epoch.number, values, source)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            readers, self._readers = self._readers, []
        for reader in readers:
            reader.close()

    def _look_up(
        self, operator: str, state: str, keys: list[Key]
    ) -> tuple[Lookup, list[Value], Source]:
        failure: CairnError | OSError | None = None
        for attempt in range(TRIES_MAX):
            lookup = self._lookup(operator, state)
            places = [lookup.place(key) for key in keys]
            held, floor_ms, missing = self._from_slots(lookup, places)
            source: Source = "slot"
            # Asked again only if another epoch is committed by now: slots move on with it.
            is_stale = self._leader.committed is not lookup.epoch
            if missing and is_stale and attempt + 1 < TRIES_MAX:
                continue
            if missing:
                try:
                    held |= self._from_checkpoint(lookup, missing)
                except (OSError, RestoreError) as error:
                    # Its files may be collected: when several epochs have come since.
                    failure = error
                    continue
                source = "checkpoint"
            seen: Held = {}
            for place in places:
                if place is not None and place.at not in seen:
                    seen[place.at] = lookup.visible(place.key, held.get(place.at), floor_ms)
            found = [ABSENT if place is None else seen[place.at] for place in places]
            return lookup, found, source
        raise QueryError(
            f"state {state!r} of operator {operator!r} could be read neither from the slots nor "
            f"from the checkpoint: {failure}",
            operator=operator,
            state=state,
        ) from failure

    def _lookup(self, operator: str, state: str) -> Lookup:
        # Both at once: the operators of the epochs to come may be others.
        by = self._leader.committed_by
        epoch, operators = (self._leader.committed, self._leader.operators) if by is None else by
        if epoch is None:
            raise EpochError(
                f"job {self._job!r} has no committed epoch yet\n"
                "  next: wait for the first one, for example with run.process_all_available()"
            )
        known = self._lookups.get((operator, state))
        if known is None or known.epoch is not epoch:
            known = Lookup(epoch, operator, state, self._group_count)
            if known.decl.kind == Aggregating.kind:
                known.result = self._result(operators.get(operator), known)
            self._lookups[operator, state] = known
        return known

    def _result(self, spec: OperatorSpec | None, lookup: Lookup) -> Folds:
        """Return the function from a stored accumulator to the result of an aggregate."""
        name = lookup.operator, lookup.state
        known = self._results.get(name)
        if spec is not None and (known is None or known[0] is not spec):
            declared = find_states(spec.load()).get(lookup.state)
            known = self._results[name] = (
                spec,
                declared if isinstance(declared, Aggregating) else None,
            )
        declared = None if spec is None or known is None else known[1]
        if declared is None or declared.ddl != lookup.decl.type:
            # From a start with another function to its first epoch.
            raise QueryError(
                f"epoch {lookup.epoch.number} was made by another version of operator "
                f"{lookup.operator!r}, which aggregated {lookup.state!r} in another way\n"
                "  next: wait for the next epoch, or read what is held with cairn.read_state(...)",
                operator=lookup.operator,
                state=lookup.state,
            )
        return declared.aggregate.result

    def _from_slots(
        self, lookup: Lookup, places: list[Place | None]
    ) -> tuple[Held, int | None, list[Place]]:
        """(what is held by group and key, as of when expired state is gone, what no slot has)."""
        by_subtask: dict[int, list[Place]] = {}
        # A key that is asked for twice is looked up once.
        for place in {place.at: place for place in places if place is not None}.values():
            by_subtask.setdefault(place.subtask, []).append(place)
        asked = {
            subtask: LookupRequest(
                lookup.uid,
                lookup.state,
                theirs[0].version,
                lookup.form,
                [place.group for place in theirs],
                [place.packed for place in theirs],
            )
            for subtask, theirs in by_subtask.items()
        }
        told = self._ask(asked)
        held: Held = {}
        missing: list[Place] = []
        floor_ms = lookup.floor_ms
        for subtask, theirs in by_subtask.items():
            answer = told.get(subtask)
            if answer is None or answer.values is None:
                missing += theirs
                continue
            if answer.floor_ms is not None:
                # State that expired by then may be gone in one slot and not yet in another.
                floor_ms = max(answer.floor_ms, answer.floor_ms if floor_ms is None else floor_ms)
            for place, raw in zip(theirs, answer.values, strict=True):
                if raw is not None:
                    held[place.at] = unpack_held(lookup.packing, raw)
        return held, floor_ms, missing

    def _from_checkpoint(self, lookup: Lookup, places: list[Place]) -> Held:
        by_group: dict[int, list[Key]] = {}
        for place in places:
            by_group.setdefault(place.group, []).append(place.key)
        held: Held = {}
        with self._reader(lookup.epoch) as reader:
            # They come range by range, and the reader has the files of one range open at a time.
            for group, keys in by_group.items():
                narrowed = None
                if lookup.columns.is_ordered_by_arrow and None not in keys:
                    try:
                        wanted = pa.array(keys, lookup.columns.keys.arrow)
                    except (pa.ArrowException, OverflowError) as error:
                        raise lookup.misfit(keys[0] if len(keys) == 1 else keys, error) from None
                    narrowed = {lookup.state: wanted}
                chunks = reader.chunks(
                    lookup.uid, range(group, group + 1), [lookup.state], narrowed
                )
                for chunk in chunks:
                    found = lookup.collect_rows(chunk.rows[lookup.state])
                    held |= {(group, key): found[key] for key in keys if key in found}
        return held

    @contextmanager
    def _reader(self, epoch: Epoch) -> Iterator[EpochReader]:
        """One of the readers of an epoch, for this thread. Its files stay open for the next."""
        with self._reading:
            with self._lock:
                mine = [reader for reader in self._readers if reader.epoch is epoch]
                reader = mine[0] if mine else EpochReader(self._leader.store, epoch)
                if mine:
                    self._readers.remove(reader)
            try:
                yield reader
            except BaseException:
                reader.close()
                raise
            with self._lock:
                newest = self._leader.committed
                unused = [old for old in self._readers if old.epoch is not newest]
                self._readers = [kept for kept in self._readers if kept not in unused]
                (unused if self._is_closed else self._readers).append(reader)
            for old in unused:
                old.close()
