"""What an operator's state is in a manifest: an entry for each scope that it has state of.

    keyed     the state of its keys: by key group, so by range
    subtask   the lists of its subtasks, each in the first key group that the subtask owns
    shared    broadcast state: one range of all key groups that every subtask holds

Always true here:
- an operator's own entry has its uid; other entries have names that no user can give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from cairn.functions import Function, find_states
from cairn.protocol.spec import OperatorSpec
from cairn.state import Broadcast, Declaration, OperatorList
from cairn.storage.manifest import Scope, StateDecl

SHARED_KEY: Final = "key"
"""What the key column of broadcast state is called."""


class EntrySpec(NamedTuple):
    """An entry as the program declares it."""

    uid: str
    scope: Scope
    key_types: dict[str, str]
    states: Mapping[str, Declaration]
    operator: str = ""
    """Whose it is."""
    delay_ms: int = 0
    """How far behind the job's watermark event time is there."""

    @property
    def decls(self) -> dict[str, StateDecl]:
        """What the manifest says of the states."""
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
        """How lists are handed out when the parallelism changes, as a part of a version."""
        lists = [d for d in self.states.values() if isinstance(d, OperatorList)]
        return ",".join(sorted(f"{each.name}={each.redistribute}" for each in lists))


def shared_uid(uid: str) -> str:
    """The entry of an operator's broadcast state."""
    return f"{uid}:broadcast"


def own_states(function: Function) -> dict[str, Declaration]:
    """The state of a function's keys, or of its subtasks."""
    declared = find_states(function)
    return {name: d for name, d in declared.items() if not isinstance(d, Broadcast)}


def entries_of(spec: OperatorSpec, function: Function | None = None) -> list[EntrySpec]:
    """All of an operator, its own first. `function`: in place of the one it has."""
    states = own_states(spec.load() if function is None else function)
    scope: Scope = "keyed" if spec.keys else "subtask"
    found = [EntrySpec(spec.uid, scope, spec.key_types, states, spec.uid, spec.delay_ms)]
    if isinstance(spec.broadcast, Broadcast):
        shared = spec.broadcast
        key_types = {SHARED_KEY: shared.key_ddl}
        uid = shared_uid(spec.uid)
        found.append(EntrySpec(uid, "shared", key_types, {shared.name: shared}, spec.uid))
    return found
