"""May this program go on from that epoch? Compared before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

from cairn.errors import PlanError, StateSchemaError
from cairn.storage.manifest import Epoch, OperatorEntry, StateDecl


def check_resume(
    newest: Epoch,
    operators: Mapping[str, tuple[dict[str, str], dict[str, StateDecl]]],
    *,
    job_name: str,
    url: str,
    allow_dropped_state: bool,
) -> None:
    """`operators`: per uid the key types and the declared state of the program."""
    where = f"cannot go on with job {job_name!r} from epoch {newest.number} of {url}"
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
        _check_states(where, entry, states, allow_dropped_state=allow_dropped_state)


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


def _check_states(
    where: str, entry: OperatorEntry, states: dict[str, StateDecl], *, allow_dropped_state: bool
) -> None:
    for name, held in entry.states.items():
        declared = states.get(name)
        if declared is None:
            if allow_dropped_state:
                continue
            raise StateSchemaError(
                f"{where}\n  operator {entry.uid!r}: the epoch holds state {name!r}, which the "
                "function does not declare\n"
                "  next: declare it again, or pass allow_dropped_state=True to lose it",
                operator=entry.uid,
                state=name,
            )
        if declared != held:
            raise StateSchemaError(
                f"{where}\n  operator {entry.uid!r}, state {name!r}: the epoch holds "
                f"{_shown(held)}, the job declares {_shown(declared)}\n"
                "  next: declare the type it has, or give the state a new name",
                operator=entry.uid,
                state=name,
                expected=_shown(declared),
                found=_shown(held),
            )


def _shown(state: StateDecl) -> str:
    types = state.type if state.entry_type is None else f"{state.entry_type}, {state.type}"
    return f"{state.kind} of {types}"
