"""What a savepoint is to hold, before it is written: states kept, replaced, corrected, moved.

Always true here:
- nothing is written, and what it is made of is not changed;
- an entry of the same keys keeps its rows until they are replaced or removed by name: nothing
  is lost by a declaration alone;
- rows that are given fit their state's columns and types.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from cairn.errors import PlanError, StateNotFoundError
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS, timer_states
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.holds import Reading
from cairn.snapshots.reader import entry_with
from cairn.snapshots.savepoint import Savepoint, open_savepoint
from cairn.snapshots.table_rows import TableRows
from cairn.state import TTL
from cairn.storage.log import read_job
from cairn.storage.manifest import Scope, StateDecl, entry_uids
from cairn.storage.store import NotFoundError, Store, open_store

TIMERS = (EVENT_TIMERS, PROCESSING_TIMERS)
HOLD_MS = 3_600_000
"""For rows to be made, from one call to the next."""


@dataclass
class DraftState:
    decl: StateDecl
    kept: tuple[str, str] | None = None
    """Operator and state whose rows it has, as the savepoint that is edited calls them."""
    given: list[Any] = field(default_factory=list)
    """Tables: what later ones say counts."""
    is_put: bool = False
    """The first one given stands in place of all that was there."""
    is_due: bool = False
    """The rows it had do not fit any more: others must be given."""


@dataclass
class DraftEntry:
    """State of one scope of an operator, as savepoints and manifests have it."""

    uid: str
    scope: Scope
    key_types: dict[str, str]
    states: dict[str, DraftState]
    function_version: str = ""
    parallelism: int = 0
    """Of subtasks, where these have lists."""


@dataclass
class CheckpointBase:
    """An epoch of a checkpoint, saved when the draft is written; held until the draft is gone."""

    store: Store
    reading: Reading
    spark_store: Store | None = None
    """Has Spark's folder, where that is not the checkpoint."""

    def __post_init__(self) -> None:
        weakref.finalize(self, self.reading.release)

    @property
    def epoch(self) -> int:
        return self.reading.number


@dataclass
class Draft:
    job: str
    group_count: int
    entries: dict[str, DraftEntry]
    base: Savepoint | CheckpointBase | None = None
    now_ms: int | None = None
    """What time it is in it, by the clock; None: when it is written."""
    watermark_ms: int | None = None
    base_group_count: int = 0
    keeps_timers: bool = True
    """The earliest timers are known to be what they were."""

    # Finding

    def entry(self, operator: str, state: str) -> DraftEntry:
        """The entry of an operator that has a state, of whichever scope."""
        uid = entry_with(self.entries, operator, state)
        entry = self.entries.get(uid)
        if entry is not None and entry.scope == "keyed" and state in TIMERS:
            # Any operator with keys may have timers; those of others are never looked at.
            for name, timer in timer_states().items():
                entry.states.setdefault(name, DraftState(_decl(timer)))
        if entry is None or state not in entry.states:
            raise self._unknown(operator, state)
        return entry

    def is_by_key(self, entry: DraftEntry) -> bool:
        """Whether its rows lie in the groups of their keys."""
        scope = entry.scope
        if scope == "feedback":
            # Records lie as the state of the operator does that they go to.
            target = self.entries.get(entry.uid.split(":")[1])
            scope = "keyed" if target is None else target.scope
        return scope == "keyed"

    def rows_of(self, entry: DraftEntry, state: str, decl: StateDecl | None = None) -> TableRows:
        """How rows of a state look."""
        decl = decl or entry.states[state].decl
        ttl = TTL.of(decl.ttl)
        stamp_ms = self.watermark_ms if ttl is not None and ttl.clock == "event" else self.now_ms
        if ttl is not None and ttl.clock == "processing" and stamp_ms is None:
            stamp_ms = 0  # Known when it is written.
        return TableRows(entry.uid, StateColumns(state, decl, entry.key_types), stamp_ms)

    def _unknown(self, operator: str, state: str | None) -> StateNotFoundError:
        uids = entry_uids(self.entries, operator)
        if not uids or state is None:
            there = ", ".join(sorted({uid.split(":")[0] for uid in self.entries})) or "none"
            return StateNotFoundError(
                f"the savepoint has no operator {operator!r}\n  found: {there}\n"
                f"  next: declare({operator!r}, keys=..., states=...) adds one",
                operator=operator,
            )
        there = ", ".join(name for uid in uids for name in self.entries[uid].states) or "none"
        return StateNotFoundError(
            f"operator {operator!r} has no state {state!r} in the savepoint\n  found: {there}\n"
            f"  next: declare({operator!r}, states={{{state!r}: ...}}) adds it",
            operator=operator,
            state=state,
        )

    # Changing

    def give(self, operator: str, state: str, table: Any, schema: pa.Schema, *, put: bool) -> None:
        """Rows of a state: in place of all that it has, or of the places they name."""
        if isinstance(self.base, CheckpointBase):
            self.base.reading.renew()
        entry = self.entry(operator, state)
        if entry.scope == "feedback":
            raise PlanError(
                f"records on their way back in loop {operator!r} cannot be written\n"
                "  found: state that only a running loop fills\n"
                "  next: keep them, or remove() them",
                operator=operator,
            )
        self.rows_of(entry, state).check(schema)
        held = entry.states[state]
        if held.is_due and not put:
            raise PlanError(
                f"state {state!r} of operator {operator!r} was declared anew and has no rows yet\n"
                "  found: patch()\n  next: put() all of its rows first",
                operator=operator,
                state=state,
            )
        if put:
            held.kept, held.given = None, [table]
            held.is_put, held.is_due = True, False
        else:
            held.given.append(table)
        self.keeps_timers = self.keeps_timers and state not in TIMERS

    def remove(self, operator: str, state: str | None) -> None:
        if state is None:
            uids = entry_uids(self.entries, operator)
            if not uids:
                raise self._unknown(operator, None)
            # The records that loops send it, too: nobody would take them.
            uids += [u for u, e in self.entries.items() if _goes_to(e, operator) and u not in uids]
            for uid in uids:
                del self.entries[uid]
        else:
            del self.entry(operator, state).states[state]
        self.keeps_timers = False

    def rename(self, operator: str, new_uid: str) -> None:
        """The operator's state, and the records that loops send it, go by another name."""
        if not entry_uids(self.entries, operator):
            raise self._unknown(operator, None)
        if entry_uids(self.entries, new_uid) or ":" in new_uid or not new_uid:
            raise PlanError(
                f"operator {operator!r} cannot be called {new_uid!r}\n"
                f"  found: {'such an operator' if new_uid in self.entries else 'no name for one'}\n"
                "  next: give a name that no other operator has",
                operator=operator,
            )
        renamed = {}
        for uid, entry in self.entries.items():
            first, _, second = uid.partition(":")
            first = new_uid if first == operator else first
            if _goes_to(entry, operator):
                second = new_uid
            entry.uid = f"{first}:{second}" if second else first
            renamed[entry.uid] = entry
        self.entries = renamed
        self.keeps_timers = False

    def regroup(self, group_count: int) -> None:
        """Another number of key groups."""
        for entry in self.entries.values():
            if (
                entry.scope != "shared"
                and not self.is_by_key(entry)
                and (entry.parallelism > group_count)
            ):
                raise PlanError(
                    f"max_parallelism={group_count} is too little for operator {entry.uid!r}\n"
                    f"  found: lists of {entry.parallelism} subtasks\n"
                    f"  next: run the job with at most {group_count} subtasks, then take the "
                    "savepoint again",
                    operator=entry.uid,
                )
        self.group_count = group_count

    def declare(
        self, uid: str, scope: Scope, key_types: dict[str, str], states: dict[str, StateDecl]
    ) -> None:
        """An entry, or more and other states of one that is there."""
        held = self.entries.get(uid)
        if held is None:
            fresh = {name: DraftState(decl) for name, decl in states.items()}
            self.entries[uid] = DraftEntry(uid, scope, key_types, fresh)
            return
        is_other = held.scope != scope or list(held.key_types.items()) != list(key_types.items())
        left = [name for name in held.states if name not in states and name not in TIMERS]
        if is_other and left:
            raise PlanError(
                f"operator {uid!r} is declared with other keys\n"
                f"  found: state {left[0]!r}, which has the keys of before: "
                f"{_shown(held.key_types)}\n"
                f"  next: declare it too and put() its rows, or remove({uid!r}, {left[0]!r})",
                operator=uid,
                state=left[0],
            )
        if is_other:
            # Timers of keys that are no more are of no use; others can be put.
            self.keeps_timers = False
            before, held.states = held.states, {}
            held.scope, held.key_types, held.parallelism = scope, key_types, 0
        else:
            before = dict(held.states)
        for name, decl in states.items():
            known = before.get(name)
            if known is None or is_other or known.decl != decl:
                is_due = known is not None and name not in TIMERS and _has_rows(known)
                held.states[name] = DraftState(decl, is_due=is_due)

    def check_complete(self) -> None:
        for entry in self.entries.values():
            for name, state in entry.states.items():
                if state.is_due:
                    raise PlanError(
                        f"state {name!r} of operator {entry.uid!r} was declared anew, and its old "
                        "rows do not fit it\n  found: no rows for it\n"
                        "  next: put() them, or remove() the state",
                        operator=entry.uid,
                        state=name,
                    )


def empty_draft(job: str, group_count: int) -> Draft:
    return Draft(job, group_count, {})


def draft_of(url: str, epoch: int | None = None, spark_url: str | None = None) -> Draft:
    """Of a savepoint, or of an epoch of a checkpoint, by default the newest.

    `spark_url`: where Spark's folder of the checkpoint is, if elsewhere.
    """
    try:
        store = open_store(url, create=False)
        job = read_job(store)
    except (NotFoundError, ValueError):
        job = None  # A savepoint is asked for, and says what is wrong.
    if job is not None:
        draft = _of_checkpoint(store, job.name, job.max_parallelism, epoch)
        if spark_url is not None:
            assert isinstance(draft.base, CheckpointBase)
            draft.base.spark_store = open_store(spark_url)
        return draft
    savepoint = open_savepoint(url)
    if epoch not in (None, savepoint.info.epoch):
        raise PlanError(
            f"a savepoint is of one epoch\n  found: epoch={epoch}, and {url} is of "
            f"{savepoint.info.epoch}\n  next: leave epoch= out"
        )
    info = savepoint.info
    entries = {}
    for uid, saved in info.operators.items():
        decls = {name: state.decl for name, state in saved.states.items()}
        entries[uid] = _kept_entry(
            uid, saved.scope, saved.key_types, decls, saved.function_version, saved.parallelism
        )
    return Draft(
        info.job,
        info.max_parallelism,
        entries,
        savepoint,
        now_ms=info.now_ms,
        watermark_ms=info.watermark_ms,
        base_group_count=info.max_parallelism,
    )


def _of_checkpoint(store: Store, job: str, group_count: int, number: int | None) -> Draft:
    base = CheckpointBase(store, Reading(store, number, HOLD_MS))
    epoch = base.reading.epoch
    entries = {}
    for uid, entry in epoch.operators.items():
        # As savepoints have them.
        decls = {n: msgspec.structs.replace(d, delay_ms=0) for n, d in entry.states.items()}
        entries[uid] = _kept_entry(
            uid, entry.scope, entry.key_types, decls, entry.function_version, len(entry.ranges)
        )
    return Draft(
        job,
        group_count,
        entries,
        base,
        now_ms=epoch.now_ms,
        watermark_ms=epoch.watermark_ms,
        base_group_count=group_count,
    )


def _kept_entry(
    uid: str,
    scope: Scope,
    key_types: dict[str, str],
    decls: dict[str, StateDecl],
    function_version: str,
    parallelism: int,
) -> DraftEntry:
    states = {name: DraftState(decl, kept=(uid, name)) for name, decl in decls.items()}
    return DraftEntry(uid, scope, dict(key_types), states, function_version, parallelism)


def _goes_to(entry: DraftEntry, operator: str) -> bool:
    """Whether these are records of a loop on their way back to the operator."""
    return entry.scope == "feedback" and entry.uid.partition(":")[2] == operator


def _decl(declaration: Any) -> StateDecl:
    return StateDecl(kind=declaration.kind, type=declaration.ddl, entry_type=declaration.entry_ddl)


def _has_rows(state: DraftState) -> bool:
    return state.kept is not None or bool(state.given) or state.is_due


def _shown(key_types: dict[str, str]) -> str:
    return ", ".join(f"{name} {type}" for name, type in key_types.items())
