"""The content of a savepoint before it is written: states kept, replaced, patched, renamed.

Always true here:
- nothing is written, and the edited savepoint or epoch is not changed;
- an operator with the same keys keeps its rows until they are replaced or removed by name: a
  declaration alone loses nothing;
- given rows fit their state's columns and types.
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
from cairn.snapshots.reader import uid_with_state
from cairn.snapshots.savepoint import Savepoint, open_savepoint
from cairn.snapshots.table_rows import TableRows
from cairn.state import TTL
from cairn.storage.log import read_job
from cairn.storage.manifest import Scope, StateDecl, operator_uids
from cairn.storage.store import NotFoundError, Store, open_store

TIMERS = (EVENT_TIMERS, PROCESSING_TIMERS)
HOLD_MS = 3_600_000
"""The lifetime of the hold between two calls, while the caller prepares rows."""


@dataclass
class DraftState:
    decl: StateDecl
    kept: tuple[str, str] | None = None
    """The operator and state in the edited savepoint whose rows it keeps."""
    given: list[Any] = field(default_factory=list)
    """Tables; rows of later ones win."""
    is_put: bool = False
    """The first table replaces all earlier rows."""
    is_due: bool = False
    """The earlier rows do not fit any more: others must be given."""


@dataclass
class DraftOperator:
    """The state of an operator in one scope."""

    uid: str
    scope: Scope
    key_types: dict[str, str]
    states: dict[str, DraftState]
    function_version: str = ""
    parallelism: int = 0
    """The number of subtasks that have lists; 0 without lists."""


@dataclass
class EditedEpoch:
    """An epoch of a checkpoint, saved when the draft is written; held until the draft is gone."""

    store: Store
    reading: Reading
    spark_store: Store | None = None
    """The store of Spark's folder, if it is not in the checkpoint."""

    def __post_init__(self) -> None:
        weakref.finalize(self, self.reading.release)

    @property
    def epoch(self) -> int:
        return self.reading.number


@dataclass
class Draft:
    job: str
    group_count: int
    operators: dict[str, DraftOperator]
    edited: Savepoint | EditedEpoch | None = None
    now_ms: int | None = None
    """Processing time in the savepoint; None: the time at which it is written."""
    watermark_ms: int | None = None
    edited_group_count: int = 0
    keeps_timers: bool = True
    """No change can have affected the earliest timers."""

    # Finding

    def find(self, operator: str, state: str) -> DraftOperator:
        """Return the part of an operator, of whichever scope, that has this state."""
        uid = uid_with_state(self.operators, operator, state)
        owner = self.operators.get(uid)
        if owner is not None and owner.scope == "keyed" and state in TIMERS:
            # Any keyed operator may have timers.
            for name, timer in timer_states().items():
                owner.states.setdefault(name, DraftState(_decl(timer)))
        if owner is None or state not in owner.states:
            raise self._unknown(operator, state)
        return owner

    def is_by_key(self, owner: DraftOperator) -> bool:
        """True if its rows are in the key groups of their keys."""
        scope = owner.scope
        if scope == "feedback":
            # Records are stored like the state of the operator that receives them.
            target = self.operators.get(owner.uid.split(":")[1])
            scope = "keyed" if target is None else target.scope
        return scope == "keyed"

    def rows_of(self, owner: DraftOperator, state: str, decl: StateDecl | None = None) -> TableRows:
        """Return the converter between tables and stored rows of a state."""
        decl = decl or owner.states[state].decl
        ttl = TTL.of(decl.ttl)
        stamp_ms = self.watermark_ms if ttl is not None and ttl.clock == "event" else self.now_ms
        if ttl is not None and ttl.clock == "processing" and stamp_ms is None:
            stamp_ms = 0  # Replaced when it is written.
        return TableRows(owner.uid, StateColumns(state, decl, owner.key_types), stamp_ms)

    def _unknown(self, operator: str, state: str | None) -> StateNotFoundError:
        uids = operator_uids(self.operators, operator)
        if not uids or state is None:
            there = ", ".join(sorted({uid.split(":")[0] for uid in self.operators})) or "none"
            return StateNotFoundError(
                f"the savepoint has no operator {operator!r}\n  found: {there}\n"
                f"  next: declare({operator!r}, keys=..., states=...) adds one",
                operator=operator,
            )
        there = ", ".join(name for uid in uids for name in self.operators[uid].states) or "none"
        return StateNotFoundError(
            f"operator {operator!r} has no state {state!r} in the savepoint\n  found: {there}\n"
            f"  next: declare({operator!r}, states={{{state!r}: ...}}) adds it",
            operator=operator,
            state=state,
        )

    # Changing

    def give(self, operator: str, state: str, table: Any, schema: pa.Schema, *, put: bool) -> None:
        """Add rows of a state: with `put` they replace all rows, else those of the same places."""
        if isinstance(self.edited, EditedEpoch):
            self.edited.reading.renew()
        owner = self.find(operator, state)
        if owner.scope == "feedback":
            raise PlanError(
                f"records on their way back in loop {operator!r} cannot be written\n"
                "  found: state that only a running loop fills\n"
                "  next: keep them, or remove() them",
                operator=operator,
            )
        self.rows_of(owner, state).check(schema)
        held = owner.states[state]
        if held.is_due and not put:
            raise PlanError(
                f"state {state!r} of operator {operator!r} was declared again and has no rows yet\n"
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
            uids = operator_uids(self.operators, operator)
            if not uids:
                raise self._unknown(operator, None)
            # Also the records that loops send it: nothing would receive them.
            uids += [
                uid
                for uid, each in self.operators.items()
                if _goes_to(each, operator) and uid not in uids
            ]
            for uid in uids:
                del self.operators[uid]
        else:
            del self.find(operator, state).states[state]
        self.keeps_timers = False

    def rename(self, operator: str, new_uid: str) -> None:
        """Rename an operator: its state, and the records that loops send it."""
        if not operator_uids(self.operators, operator):
            raise self._unknown(operator, None)
        if operator_uids(self.operators, new_uid) or ":" in new_uid or not new_uid:
            found = "such an operator" if new_uid in self.operators else "no name for one"
            raise PlanError(
                f"operator {operator!r} cannot be called {new_uid!r}\n  found: {found}\n"
                "  next: give a name that no other operator has",
                operator=operator,
            )
        renamed = {}
        for uid, owner in self.operators.items():
            first, _, second = uid.partition(":")
            first = new_uid if first == operator else first
            if _goes_to(owner, operator):
                second = new_uid
            owner.uid = f"{first}:{second}" if second else first
            renamed[owner.uid] = owner
        self.operators = renamed
        self.keeps_timers = False

    def regroup(self, group_count: int) -> None:
        """Change the number of key groups."""
        for owner in self.operators.values():
            if (
                owner.scope != "shared"
                and not self.is_by_key(owner)
                and (owner.parallelism > group_count)
            ):
                raise PlanError(
                    f"max_parallelism={group_count} is too small for operator {owner.uid!r}\n"
                    f"  found: lists of {owner.parallelism} subtasks\n"
                    f"  next: run the job with at most {group_count} subtasks, then take the "
                    "savepoint again",
                    operator=owner.uid,
                )
        self.group_count = group_count

    def declare(
        self, uid: str, scope: Scope, key_types: dict[str, str], states: dict[str, StateDecl]
    ) -> None:
        """Add an operator, or add and replace states of one that is there."""
        held = self.operators.get(uid)
        if held is None:
            fresh = {name: DraftState(decl) for name, decl in states.items()}
            self.operators[uid] = DraftOperator(uid, scope, key_types, fresh)
            return
        is_other = held.scope != scope or list(held.key_types.items()) != list(key_types.items())
        left = [name for name in held.states if name not in states and name not in TIMERS]
        if is_other and left:
            raise PlanError(
                f"operator {uid!r} is declared with other keys\n"
                f"  found: state {left[0]!r}, which has the keys of before: "
                f"{_show_types(held.key_types)}\n"
                f"  next: declare it too and put() its rows, or remove({uid!r}, {left[0]!r})",
                operator=uid,
                state=left[0],
            )
        if is_other:
            # Timers of the old keys are useless; new ones can be put.
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
        for owner in self.operators.values():
            for name, state in owner.states.items():
                if state.is_due:
                    raise PlanError(
                        f"state {name!r} of operator {owner.uid!r} was declared again, and its old "
                        "rows do not fit it\n  found: no rows for it\n"
                        "  next: put() them, or remove() the state",
                        operator=owner.uid,
                        state=name,
                    )


def empty_draft(job: str, group_count: int) -> Draft:
    return Draft(job, group_count, {})


def draft_of(url: str, epoch: int | None = None, spark_url: str | None = None) -> Draft:
    """Return a draft of a savepoint, or of an epoch of a checkpoint, by default the newest.

    `spark_url` is the place of Spark's folder, if it is not in the checkpoint.
    """
    try:
        store = open_store(url, create=False)
        job = read_job(store)
    except (NotFoundError, ValueError):
        job = None  # `open_savepoint` raises the error.
    if job is not None:
        draft = _of_checkpoint(store, job.name, job.max_parallelism, epoch)
        if spark_url is not None:
            assert isinstance(draft.edited, EditedEpoch)
            draft.edited.spark_store = open_store(spark_url)
        return draft
    savepoint = open_savepoint(url)
    if epoch not in (None, savepoint.info.epoch):
        raise PlanError(
            f"a savepoint has one epoch\n  found: epoch={epoch}, but {url} has "
            f"{savepoint.info.epoch}\n  next: leave epoch= out"
        )
    info = savepoint.info
    operators = {}
    for uid, saved in info.operators.items():
        decls = {name: state.decl for name, state in saved.states.items()}
        operators[uid] = _keep_operator(
            uid, saved.scope, saved.key_types, decls, saved.function_version, saved.parallelism
        )
    return Draft(
        info.job,
        info.max_parallelism,
        operators,
        savepoint,
        now_ms=info.now_ms,
        watermark_ms=info.watermark_ms,
        edited_group_count=info.max_parallelism,
    )


def _of_checkpoint(store: Store, job: str, group_count: int, number: int | None) -> Draft:
    edited = EditedEpoch(store, Reading(store, number, HOLD_MS))
    epoch = edited.reading.epoch
    operators = {}
    for uid, operator in epoch.operators.items():
        # Savepoints store no delays.
        decls = {n: msgspec.structs.replace(d, delay_ms=0) for n, d in operator.states.items()}
        operators[uid] = _keep_operator(
            uid,
            operator.scope,
            operator.key_types,
            decls,
            operator.function_version,
            len(operator.ranges),
        )
    return Draft(
        job,
        group_count,
        operators,
        edited,
        now_ms=epoch.now_ms,
        watermark_ms=epoch.watermark_ms,
        edited_group_count=group_count,
    )


def _keep_operator(
    uid: str,
    scope: Scope,
    key_types: dict[str, str],
    decls: dict[str, StateDecl],
    function_version: str,
    parallelism: int,
) -> DraftOperator:
    states = {name: DraftState(decl, kept=(uid, name)) for name, decl in decls.items()}
    return DraftOperator(uid, scope, dict(key_types), states, function_version, parallelism)


def _goes_to(owner: DraftOperator, operator: str) -> bool:
    """True for records of a loop on their way back to the operator."""
    return owner.scope == "feedback" and owner.uid.partition(":")[2] == operator


def _decl(declaration: Any) -> StateDecl:
    return StateDecl(kind=declaration.kind, type=declaration.ddl, entry_type=declaration.entry_ddl)


def _has_rows(state: DraftState) -> bool:
    return state.kept is not None or bool(state.given) or state.is_due


def _show_types(key_types: dict[str, str]) -> str:
    return ", ".join(f"{name} {type}" for name, type in key_types.items())
