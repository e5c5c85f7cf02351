"""May this program go on from that epoch? Compared before anything runs.

Always true here:
- state and positions of sources are given up only where `allow_dropped_state` says so;
- state that is let pass can be read as declared, by itself or with its migrate=.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cairn.errors import PlanError, StateSchemaError
from cairn.evolution import IncompatibleError, compare
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.state import Declaration
from cairn.storage.manifest import Epoch, OperatorEntry
from cairn.storage.spark_log import match_sources


def check_resume(
    newest: Epoch,
    operators: Mapping[str, tuple[dict[str, str], Mapping[str, Declaration]]],
    *,
    job_name: str,
    url: str,
    allow_dropped_state: bool,
) -> frozenset[str]:
    """The uids of operators whose state must be written anew, as their stored rows do not fit.

    `operators`: per uid the key types and the declared state of the program. An operator
    that gives up a state is among them too: its rows would come back with the name.
    """
    where = _where(newest, job_name, url)
    anew = set()
    for uid, entry in newest.operators.items():
        if uid not in operators:
            if allow_dropped_state:
                continue
            known = ", ".join(operators) or "none"
            raise PlanError(
                f"{where}\n  the epoch holds state of operator {uid!r}, the program has: {known}\n"
                "  next: give the operator its old uid back, or pass allow_dropped_state=True to "
                "lose that state",
                uid=uid,
            )
        keys, states = operators[uid]
        _check_keys(where, entry, keys)
        if not _fits(where, entry, states, allow_dropped_state=allow_dropped_state):
            anew.add(uid)
    return frozenset(anew)


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


def _check_keys(where: str, entry: OperatorEntry, keys: dict[str, str]) -> None:
    if list(entry.key_types.items()) != list(keys.items()):
        found = ", ".join(f"{n} {t}" for n, t in entry.key_types.items())
        declared = ", ".join(f"{n} {t}" for n, t in keys.items())
        raise StateSchemaError(
            f"{where}\n  operator {entry.uid!r}: the epoch is keyed by ({found}), the job by "
            f"({declared}); they hash differently\n"
            "  next: key by the same columns and types, or give the operator a new uid",
            operator=entry.uid,
            expected=declared,
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
    for name, held in entry.states.items():
        declaration = states.get(name)
        if declaration is None:
            if allow_dropped_state:
                fits = False
                continue
            is_timer = name in (EVENT_TIMERS, PROCESSING_TIMERS)
            again = "give it on_timer() again" if is_timer else "declare it again"
            raise StateSchemaError(
                f"{where}\n  operator {entry.uid!r}: the epoch holds state {name!r}, which the "
                "function does not declare\n"
                f"  next: {again}, or pass allow_dropped_state=True to lose it",
                operator=entry.uid,
                state=name,
            )
        try:
            fits = compare(held, declaration) == "same" and fits
        except IncompatibleError as error:
            found = _shown(held.kind, held.type, held.entry_type)
            declared = _shown(declaration.kind, declaration.ddl, declaration.entry_ddl)
            raise StateSchemaError(
                f"{where}\n  operator {entry.uid!r}, state {name!r}: the epoch holds "
                f"{found}, the job declares {declared}\n"
                f"  {error.reason}\n  next: {error.next_step}",
                operator=entry.uid,
                state=name,
                expected=declared,
                found=found,
                reason=error.reason,
            ) from None
    return fits


def _shown(kind: str, type: str, entry_type: str | None) -> str:
    return f"{kind} of {type if entry_type is None else f'{entry_type}, {type}'}"
