"""May this program go on from that epoch? Compared before anything runs.

Always true here:
- state and positions of sources are given up only where `allow_dropped_state` says so;
- state that is let pass can be read as declared, by itself or with its migrate=.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cairn.driver.coordinator.rounds import has_records
from cairn.errors import PlanError, StateSchemaError
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.protocol.entry import EntrySpec
from cairn.state import Declaration
from cairn.storage.manifest import Epoch, OperatorEntry
from cairn.storage.spark_log import match_sources
from cairn.types.evolution import IncompatibleError, compare


def check_resume(
    newest: Epoch,
    entries: Mapping[str, EntrySpec],
    *,
    job_name: str,
    url: str,
    allow_dropped_state: bool,
) -> frozenset[str]:
    """The uids of entries whose state must be written anew, as their stored rows do not fit.

    `entries`: what the program declares, by uid. One that gives up a state is among those
    written anew too: its rows would come back with the name.
    """
    where = _where(newest, job_name, url)
    anew = set()
    for uid, entry in newest.operators.items():
        if entry.scope == "feedback" and not has_records(entry):
            continue  # Nothing is on its way back: the loop may be another one, or gone.
        declared = entries.get(uid)
        if declared is None:
            if not allow_dropped_state and (entry.states or entry.scope == "feedback"):
                raise _gone(where, entry, entries)
        elif declared.scope != entry.scope:
            if entry.states and not allow_dropped_state:
                raise _other_scope(where, entry, declared)
        else:
            _check_keys(where, entry, declared)
            if not _fits(where, entry, declared.states, allow_dropped_state=allow_dropped_state):
                anew.add(uid)
    return frozenset(anew)


def _gone(where: str, entry: OperatorEntry, entries: Mapping[str, EntrySpec]) -> PlanError:
    operator = entry.uid.split(":")[0]
    if entry.scope == "shared" and operator in entries:
        names = ", ".join(repr(name) for name in entry.states)
        return PlanError(
            f"{where}\n  operator {operator!r}: the epoch holds broadcast state {names}, the "
            "program has none there\n"
            "  next: declare it again, .broadcast(rows, state.Broadcast(...)), or pass "
            "allow_dropped_state=True to lose it",
            uid=operator,
        )
    if entry.scope == "feedback":
        consumer = entry.uid.split(":")[1]
        return PlanError(
            f"{where}\n  the epoch holds records that loop {operator!r} sends back to operator "
            f"{consumer!r}, the program sends none there\n"
            "  next: let the program of before run until nothing is in flight, or pass "
            "allow_dropped_state=True to lose them",
            uid=operator,
        )
    known = ", ".join(uid for uid in entries if ":" not in uid) or "none"
    return PlanError(
        f"{where}\n  the epoch holds state of operator {operator!r}, the program has: {known}\n"
        "  next: give the operator its old uid back, or pass allow_dropped_state=True to "
        "lose that state",
        uid=operator,
    )


_SCOPES = {
    "keyed": "state of keys (of a KeyedProcess or a BatchProcess)",
    "subtask": "lists of subtasks (of a Process)",
    "shared": "broadcast state",
    "feedback": "records of a loop",
}


def _other_scope(where: str, entry: OperatorEntry, declared: EntrySpec) -> StateSchemaError:
    found, expected = _SCOPES[entry.scope], _SCOPES[declared.scope]
    return StateSchemaError(
        f"{where}\n  operator {entry.uid!r}: the epoch holds {found}, the job declares {expected}; "
        "one cannot become the other\n"
        "  next: give the operator a new uid, or pass allow_dropped_state=True to lose that state",
        operator=entry.uid,
        expected=declared.scope,
        found=entry.scope,
    )


def check_sources(
    newest: Epoch,
    sources: Sequence[str],
    *,
    reset_sources: Collection[str] = (),
    job_name: str,
    url: str,
    allow_dropped_state: bool,
) -> None:
    """`sources`: the program's, in the order in which Spark numbers them."""
    unknown = [name for name in reset_sources if name not in sources]
    if unknown:
        raise PlanError(
            f"reset_sources names {unknown[0]!r}, which job {job_name!r} does not read\n"
            f"  found: {', '.join(sources)}",
            source=unknown[0],
        )
    where = _where(newest, job_name, url)
    held = ", ".join(newest.spark.sources) or "unnamed sources"
    change = match_sources(newest.spark, sources, reset_sources)
    if change is None:
        raise PlanError(
            f"{where}\n  the epoch was made from {held}; the job reads {', '.join(sources)}\n"
            "  which position is whose cannot be told, as one of them is several inputs to Spark\n"
            "  next: start with the sources it had, in that order, and without reset_sources",
            expected=list(sources),
            found=list(newest.spark.sources),
        )
    if change.dropped and not allow_dropped_state:
        raise PlanError(
            f"{where}\n  the epoch was made from {held}; the job does not read "
            f"{', '.join(change.dropped)}\n"
            "  how far it was read would be forgotten: added again, it starts from its beginning\n"
            "  next: give the source its old name back, or pass allow_dropped_state=True",
            source=change.dropped[0],
        )


def _where(newest: Epoch, job_name: str, url: str) -> str:
    return f"cannot go on with job {job_name!r} from epoch {newest.number} of {url}"


def _check_keys(where: str, entry: OperatorEntry, program: EntrySpec) -> None:
    keys = program.key_types
    if entry.scope == "shared":
        _check_shared_keys(where, entry, program)
    elif list(entry.key_types.items()) != list(keys.items()):
        found = ", ".join(f"{n} {t}" for n, t in entry.key_types.items())
        declared = ", ".join(f"{n} {t}" for n, t in keys.items())
        raise StateSchemaError(
            f"{where}\n  operator {entry.uid!r}: the epoch is keyed by ({found}), the job by "
            f"({declared}); they hash differently\n"
            "  next: key by the same columns and types, give the operator a new uid, or write a "
            "savepoint with the new keys: SavepointWriter.of(...).declare(..., keys=...)",
            operator=entry.uid,
            expected=declared,
            found=found,
        )


def _check_shared_keys(where: str, entry: OperatorEntry, program: EntrySpec) -> None:
    kept = [name for name in entry.states if name in program.states]
    if kept and entry.key_types != program.key_types:
        (found,), (expected,) = entry.key_types.values(), program.key_types.values()
        raise StateSchemaError(
            f"{where}\n  operator {program.operator!r}, broadcast state {kept[0]!r}: the epoch "
            f"has keys of type {found}, the job declares {expected}\n"
            "  the keys of a map are told apart by their type, which cannot change\n"
            f"  next: declare the keys as {found}, or give the state a new name",
            operator=program.operator,
            state=kept[0],
            expected=expected,
            found=found,
        )


def _fits(
    where: str,
    entry: OperatorEntry,
    states: Mapping[str, Declaration],
    *,
    allow_dropped_state: bool,
) -> bool:
    """Whether the stored rows can be read as they are."""
    fits = True
    uid = entry.uid.split(":")[0]
    for name, held in entry.states.items():
        declaration = states.get(name)
        if declaration is None:
            if allow_dropped_state:
                fits = False
                continue
            is_timer = name in (EVENT_TIMERS, PROCESSING_TIMERS)
            again = "give it on_timer() again" if is_timer else "declare it again"
            raise StateSchemaError(
                f"{where}\n  operator {uid!r}: the epoch holds state {name!r}, which the "
                "function does not declare\n"
                f"  next: {again}, or pass allow_dropped_state=True to lose it",
                operator=uid,
                state=name,
            )
        try:
            fits = compare(held, declaration) == "same" and fits
        except IncompatibleError as error:
            found = _shown(held.kind, held.type, held.entry_type)
            declared = _shown(declaration.kind, declaration.ddl, declaration.entry_ddl)
            raise StateSchemaError(
                f"{where}\n  operator {uid!r}, state {name!r}: the epoch holds "
                f"{found}, the job declares {declared}\n"
                f"  {error.reason}\n  next: {_next_step(entry, error)}",
                operator=uid,
                state=name,
                expected=declared,
                found=found,
                reason=error.reason,
            ) from None
    return fits


def _next_step(entry: OperatorEntry, error: IncompatibleError) -> str:
    if entry.scope == "feedback":
        return "let the program of before run until nothing is in flight"
    return error.next_step


def _shown(kind: str, type: str, entry_type: str | None) -> str:
    if kind == "operator_list":
        return f"operator list of {type}"
    return f"{kind} of {type if entry_type is None else f'{entry_type}, {type}'}"
