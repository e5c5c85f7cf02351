"""A program goes on from an epoch only if every state it finds there is one it declares."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.coordinator.resume import check_resume
from cairn.errors import PlanError, StateSchemaError
from cairn.storage.manifest import StateDecl
from tests.unit.coordinator.manifests import entry, epoch

KEYS = {"k": "bigint", "l": "string"}
TOTAL = StateDecl(kind="value", type="bigint")
SEEN = StateDecl(kind="map", type="bigint", entry_type="string")
HELD = epoch(41, entry(uid="score", keys=KEYS, states={"total": TOTAL, "seen": SEEN}))


def check(*, allow_dropped_state: bool = False, **operators: Any) -> None:
    check_resume(
        HELD,
        operators,
        job_name="fraud",
        url="file:///ckpt",
        allow_dropped_state=allow_dropped_state,
    )


def test_the_same_program_goes_on() -> None:
    check(score=(KEYS, {"total": TOTAL, "seen": SEEN}))


def test_a_program_with_more_operators_and_more_state_goes_on() -> None:
    more = {"total": TOTAL, "seen": SEEN, "new": StateDecl(kind="list", type="double")}
    check(score=(KEYS, more), another=(KEYS, {}))


def test_an_operator_that_is_gone_is_refused_unless_its_state_may_be_lost() -> None:
    with pytest.raises(PlanError, match="holds state of operator 'score', the program has: other"):
        check(other=(KEYS, {}))
    check(other=(KEYS, {}), allow_dropped_state=True)


def test_state_that_is_gone_is_refused_unless_it_may_be_lost() -> None:
    with pytest.raises(StateSchemaError, match="holds state 'seen', which the function") as caught:
        check(score=(KEYS, {"total": TOTAL}))
    assert (caught.value.operator, caught.value.state) == ("score", "seen")
    check(score=(KEYS, {"total": TOTAL}), allow_dropped_state=True)


@pytest.mark.parametrize(
    "keys",
    [
        {"k": "bigint"},
        {"k": "int", "l": "string"},
        {"l": "string", "k": "bigint"},
        {"k": "bigint", "m": "string"},
    ],
    ids=["fewer", "other type", "other order", "other name"],
)
@pytest.mark.parametrize("allow_dropped_state", [False, True])
def test_other_keys_are_refused_whatever_may_be_lost(
    keys: dict[str, str], allow_dropped_state: bool
) -> None:
    with pytest.raises(StateSchemaError, match=r"keyed by \(k bigint, l string\)") as caught:
        check(score=(keys, {"total": TOTAL, "seen": SEEN}), allow_dropped_state=allow_dropped_state)
    assert caught.value.found == "k bigint, l string"


@pytest.mark.parametrize(
    ("declared", "shown"),
    [
        (StateDecl(kind="value", type="string"), "value of string"),
        (StateDecl(kind="reducing", type="bigint"), "reducing of bigint"),
        (StateDecl(kind="list", type="bigint"), "list of bigint"),
        (StateDecl(kind="map", type="bigint", entry_type="int"), "map of int, bigint"),
    ],
)
def test_state_of_another_kind_or_type_is_refused(declared: StateDecl, shown: str) -> None:
    with pytest.raises(StateSchemaError) as caught:
        check(score=(KEYS, {"total": declared, "seen": SEEN}))
    error = caught.value
    assert (error.found, error.expected) == ("value of bigint", shown)
    assert str(error).startswith("cannot go on with job 'fraud' from epoch 41 of file:///ckpt")
    assert "next: " in str(error)


def test_a_map_with_other_keys_is_refused() -> None:
    other = StateDecl(kind="map", type="bigint", entry_type="int")
    with pytest.raises(StateSchemaError, match="map of string, bigint"):
        check(score=(KEYS, {"total": TOTAL, "seen": other}))
