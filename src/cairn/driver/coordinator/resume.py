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
from cairn.protocol.scoped_state import ScopedState
from cairn.storage.manifest import Epoch, EpochOperator
from cairn.storage.spark_log import match_sources
from cairn.types.evolution import IncompatibleError, compare


def check_resume(
    newest: Epoch,
    states: Mapping[str, ScopedState],
    *,
    job_name: str,
    url: str,
    allow_dropped_state: bool,
) -> frozenset[str]:
    """Return the uids of states that must be written again, as their stored rows do not fit.

    `states` is what the program declares, by uid. A uid with a state that the program has given
    up is among them too: otherwise a later state of that name would find the old rows.
    """
    where = _where(newest, job_name, url)
    anew = set()
    for uid, stored in newest.operators.items():
        if stored.scope == "feedback" and not has_records(stored):
            continue  # Nothing is on its way back: the loop may be another one, or gone.
        declared = states.get(uid)
        if declared is None:
            if not allow_dropped_state and (stored.states or stored.scope == "feedback"):
                raise _missing_error(where, stored, states)
        elif declared.scope != stored.scope:
            if stored.states and not allow_dropped_state:
                raise _scope_error(where, stored, declared)
        else:
            _check_keys(where, stored, declared)
            if not _fits(where, stored, declared, allow_dropped_state=allow_dropped_state):
                anew.add(uid)
    return frozenset(anew)


def _missing_error(
    where: str, stored: EpochOperator, states: Mapping[str, ScopedState]
) -> PlanError:
    operator = stored.uid.split(":")[0]
    if stored.scope == "shared" and operator in states:
        names = ", ".join(repr(name) for name in stored.states)
        return PlanError(
            f"{where}\n  operator {operator!r}: the epoch holds broadcast state {names}, the "
            "program has none there\n"
            "  next: declare it again, .broadcast(rows, state.Broadcast(...)), or pass "
            "allow_dropped_state=True to lose it",
            uid=operator,
        )
    if stored.scope == "feedback":
        consumer = stored.uid.split(":")[1]
        return PlanError(
            f"{where}\n  the epoch holds records that loop {operator!r} sends back to operator "
            f"{consumer!r}, the program sends none there\n"
            "  next: let the program of before run until nothing is in flight, or pass "
            "allow_dropped_state=True to lose them",
            uid=operator,
        )
    known = ", ".join(uid for uid in states if ":" not in uid) or "none"
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


def _scope_error(where: str, stored: EpochOperator, declared: ScopedState) -> StateSchemaError:
    found, expected = _SCOPES[stored.scope], _SCOPES[declared.scope]
    return StateSchemaError(
        f"{where}\n  operator {stored.uid!r}: the epoch holds {found}, the job declares "
        f"{expected}; one cannot become the other\n"
        "  next: give the operator a new uid, or pass allow_dropped_state=True to lose that state",
        operator=stored.uid,
        expected=declared.scope,
        found=stored.scope,
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
    """Refuse a program whose sources do not fit the epoch; `sources` are in Spark's order."""
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


def _check_keys(where: str, stored: EpochOperator, program: ScopedState) -> None:
    keys = program.key_types
    if stored.scope == "shared":
        _check_shared_keys(where, stored, program)
    elif list(stored.key_types.items()) != list(keys.items()):
        found = ", ".join(f"{n} {t}" for n, t in stored.key_types.items())
        declared = ", ".join(f"{n} {t}" for n, t in keys.items())
        raise StateSchemaError(
            f"{where}\n  operator {stored.uid!r}: the epoch is keyed by ({found}), the job by "
            f"({declared}); they hash differently\n"
            "  next: key by the same columns and types, give the operator a new uid, or write a "
            "savepoint with the new keys: SavepointWriter.of(...).declare(..., keys=...)",
            operator=stored.uid,
            expected=declared,
            found=found,
        )


def _check_shared_keys(where: str, stored: EpochOperator, program: ScopedState) -> None:
    kept = [name for name in stored.states if name in program.states]
    if kept and stored.key_types != program.key_types:
        (found,), (expected,) = stored.key_types.values(), program.key_types.values()
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
    stored: EpochOperator,
    declared: ScopedState,
    *,
    allow_dropped_state: bool,
) -> bool:
    """True if the stored rows can be read as they are; raise if they cannot be migrated."""
    fits = True
    uid = stored.uid.split(":")[0]
    for name, held in stored.states.items():
        declaration = declared.states.get(name)
        if declaration is None:
            if allow_dropped_state or name in declared.retired:
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
            found = _describe(held.kind, held.type, held.entry_type)
            expected = _describe(declaration.kind, declaration.ddl, declaration.entry_ddl)
            raise StateSchemaError(
                f"{where}\n  operator {uid!r}, state {name!r}: the epoch holds "
                f"{found}, the job declares {expected}\n"
                f"  {error.reason}\n  next: {_next_step(stored, error)}",
                operator=uid,
                state=name,
                expected=expected,
                found=found,
                reason=error.reason,
            ) from None
    return fits


def _next_step(stored: EpochOperator, error: IncompatibleError) -> str:
    if stored.scope == "feedback":
        return "let the program of before run until nothing is in flight"
    return error.next_step


def _describe(kind: str, type: str, entry_type: str | None) -> str:
    if kind == "operator_list":
        return f"operator list of {type}"
    return f"{kind} of {type if entry_type is None else f'{entry_type}, {type}'}"
