"""The state of an operator, divided by scope, as the program declares it and manifests list it.

    keyed     the state of its keys, divided into ranges of key groups
    subtask   the lists of its subtasks, each in the first key group that the subtask owns
    shared    broadcast state: one range of all key groups that every subtask holds

Always true here:
- the keyed or subtask state has the operator's uid; the others have uids that users cannot choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cairn.functions import Function, find_states, hooks_of
from cairn.protocol.spec import OperatorSpec
from cairn.state import Broadcast, Declaration, OperatorList
from cairn.storage.manifest import Scope, StateDecl

SHARED_KEY: Final = "key"
"""Name of the key column of broadcast state."""


class ScopedState(NamedTuple):
    """The states of an operator in one scope."""

    uid: str
    scope: Scope
    key_types: dict[str, str]
    states: Mapping[str, Declaration]
    operator: str = ""
    """The uid of the operator."""
    delay_ms: int = 0
    """The delay of event time in the operator, behind the job's watermark."""
    retired: frozenset[str] = frozenset()
    """States of earlier versions of the function, which may be dropped."""
    parallelism: int = 0
    """The largest number of subtasks that get rows; 0: all that the job has."""
    has_broadcast: bool = False
    """Rows of a broadcast come to all subtasks, whatever `parallelism` is."""

    @property
    def decls(self) -> dict[str, StateDecl]:
        """Return the declarations as a manifest stores them."""
        return {
            name: StateDecl(
                kind=declaration.kind,
                type=declaration.ddl,
                entry_type=declaration.entry_ddl,
                ttl=None if declaration.ttl is None else declaration.ttl.text,
                delay_ms=0 if declaration.ttl is None else self.delay_ms,
            )
            for name, declaration in self.states.items()
        }

    @property
    def redistribution(self) -> str:
        """Return how each list is divided when the parallelism changes; versions contain it."""
        return ",".join(sorted(f"{each.name}={each.redistribute}" for each in self._lists))

    @property
    def is_united(self) -> bool:
        """True if all subtasks get the items of a list when the parallelism changes."""
        return any(each.redistribute == "union" for each in self._lists)

    @property
    def _lists(self) -> list[OperatorList[Any]]:
        return [each for each in self.states.values() if isinstance(each, OperatorList)]


def shared_uid(uid: str) -> str:
    """Return the uid of an operator's broadcast state."""
    return f"{uid}:broadcast"


def own_states(function: Function) -> dict[str, Declaration]:
    """Return the declared states except broadcast state."""
    declared = find_states(function)
    return {name: d for name, d in declared.items() if not isinstance(d, Broadcast)}


def states_by_scope(spec: OperatorSpec, function: Function | None = None) -> list[ScopedState]:
    """Return the states of an operator by scope, its own first.

    `function` replaces the function of the spec.
    """
    function = spec.load() if function is None else function
    states, retired = own_states(function), hooks_of(function).retired_states
    scope: Scope = "keyed" if spec.keys else "subtask"
    found = [
        ScopedState(
            spec.uid,
            scope,
            spec.key_types,
            states,
            spec.uid,
            spec.delay_ms,
            retired,
            spec.parallelism,
            spec.broadcast_inlet is not None,
        )
    ]
    if isinstance(spec.broadcast, Broadcast):
        shared = spec.broadcast
        key_types = {SHARED_KEY: shared.key_ddl}
        uid = shared_uid(spec.uid)
        found.append(ScopedState(uid, "shared", key_types, {shared.name: shared}, spec.uid))
    return found
