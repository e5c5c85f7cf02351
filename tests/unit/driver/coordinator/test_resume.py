"""A program goes on from an epoch only if every state it finds there is one it can read."""

from __future__ import annotations

import operator
from typing import Any

import msgspec
import pytest

from cairn import state
from cairn.driver.coordinator.resume import check_resume, check_sources
from cairn.errors import PlanError, StateSchemaError
from cairn.protocol.scoped_state import ScopedState
from cairn.state import Declaration
from cairn.storage.manifest import StateDecl
from tests.unit.driver.coordinator.manifests import entry, epoch, part, ref

KEYS = {"k": "bigint", "l": "string"}
TOTAL = state.Value("bigint")
SEEN = state.Map("string", "bigint")
HELD = epoch(
    41,
    entry(
        uid="score",
        keys=KEYS,
        states={
            "total": StateDecl(kind="value", type="bigint"),
            "seen": StateDecl(kind="map", type="bigint", entry_type="string"),
        },
    ),
    entry(uid="other", keys={"k": "int"}, states={"n": StateDecl(kind="value", type="int")}),
)
OTHER = ({"k": "int"}, {"n": state.Value("int")})


def check(*, allow_dropped_state: bool = False, **operators: Any) -> frozenset[str]:
    declared = {"other": OTHER, **operators}
    return check_resume(
        HELD,
        {uid: ScopedState(uid, "keyed", *each) for uid, each in declared.items()},
        job_name="fraud",
        url="file:///ckpt",
        allow_dropped_state=allow_dropped_state,
    )


def test_the_same_program_goes_on_with_nothing_written_anew() -> None:
    assert check(score=(KEYS, {"total": TOTAL, "seen": SEEN})) == frozenset()


def test_a_program_with_more_operators_and_more_state_goes_on() -> None:
    more = {"total": TOTAL, "seen": SEEN, "new": state.List("double")}
    assert check(score=(KEYS, more), another=(KEYS, {})) == frozenset()


def test_an_operator_that_is_gone_is_refused_unless_its_state_may_be_lost() -> None:
    with pytest.raises(PlanError, match="holds state of operator 'score', the program has: other"):
        check()
    assert check(allow_dropped_state=True) == frozenset()


def test_state_that_is_gone_is_refused_unless_it_may_be_lost() -> None:
    with pytest.raises(StateSchemaError, match="holds state 'seen', which the function") as caught:
        check(score=(KEYS, {"total": TOTAL}))
    assert (caught.value.operator, caught.value.state) == ("score", "seen")


def test_an_operator_that_gives_up_a_state_is_written_anew() -> None:
    """Else its rows would still lie in the files, and come back with a state of that name."""
    assert check(score=(KEYS, {"total": TOTAL}), allow_dropped_state=True) == {"score"}


@pytest.mark.parametrize(
    "total",
    [state.Value("double", migrate=float), state.Reducing("string", max, migrate=str)],
    ids=["migrate to double", "migrate to string and reducing"],
)
def test_an_operator_with_a_state_to_migrate_is_written_anew(total: Declaration) -> None:
    assert check(score=(KEYS, {"total": total, "seen": SEEN})) == {"score"}


def test_one_operator_can_be_asked_about_alone() -> None:
    """As a live upgrade does."""
    alone = msgspec.structs.replace(HELD, operators={"other": HELD.operators["other"]})
    found = check_resume(
        alone,
        {"other": ScopedState("other", "keyed", {"k": "int"}, {"n": state.Value("bigint")})},
        job_name="fraud",
        url="file:///ckpt",
        allow_dropped_state=False,
    )
    assert found == {"other"}


def test_another_kind_stored_alike_needs_nothing() -> None:
    total = state.Reducing("bigint", operator.add)
    assert check(score=(KEYS, {"total": total, "seen": SEEN})) == frozenset()


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
    ("declared", "shown", "next_step"),
    [
        (state.Value("string"), "value of string", "migrate="),
        (state.Value("int"), "value of int", "migrate="),
        (state.Value(object), "value of object", "migrate="),
        (state.List("bigint"), "list of bigint", "declare it as state.Value"),
        (state.Map("int", "bigint"), "map of int, bigint", "declare it as state.Value"),
    ],
)
def test_state_that_cannot_be_read_as_declared_is_refused(
    declared: Declaration, shown: str, next_step: str
) -> None:
    with pytest.raises(StateSchemaError) as caught:
        check(score=(KEYS, {"total": declared, "seen": SEEN}))
    error = caught.value
    assert (error.found, error.expected) == ("value of bigint", shown)
    first, second, _, last = str(error).split("\n")
    assert first == "cannot go on with job 'fraud' from epoch 41 of file:///ckpt"
    assert second == (
        f"  operator 'score', state 'total': the epoch holds value of bigint, "
        f"the job declares {shown}"
    )
    assert last.startswith("  next: ") and next_step in last


def test_a_map_with_other_keys_is_refused_even_with_a_function() -> None:
    other = state.Map("int", "bigint", migrate=int)
    with pytest.raises(StateSchemaError, match="map of string, bigint") as caught:
        check(score=(KEYS, {"total": TOTAL, "seen": other}))
    assert "next: declare the map keys as string" in str(caught.value)


# Sources


def refused(*names: str, held: str = "a b", lines: int = 2, **more: Any) -> PlanError | None:
    """Why a job that reads these cannot go on from an epoch of those that are held."""
    text = "\n".join(["v1", "{}", *('{"n":1}' for _ in range(lines))])
    made = epoch(41, offsets=text)
    spark = msgspec.structs.replace(made.spark, sources=held.split())
    given = {"job_name": "fraud", "url": "file:///ckpt", "allow_dropped_state": False, **more}
    try:
        check_sources(msgspec.structs.replace(made, spark=spark), names, **given)
    except PlanError as error:
        return error
    return None


@pytest.mark.parametrize("names", ["a b", "b a", "c b a"])
def test_sources_may_stay_move_and_be_added(names: str) -> None:
    assert refused(*names.split()) is None


def test_a_source_that_is_gone_is_refused_unless_its_position_may_be_lost() -> None:
    error = refused("a", "c")
    assert error is not None and error.source == "b"
    assert "made from a, b; the job does not read b" in str(error)
    assert "how far it was read would be forgotten" in str(error)
    assert refused("a", "c", allow_dropped_state=True) is None


def test_sources_to_reset_must_be_sources() -> None:
    assert refused("a", "b", reset_sources=("a",)) is None
    error = refused("a", "b", reset_sources=("x",))
    assert "reset_sources names 'x', which job 'fraud'" in str(error)


def test_sources_of_several_inputs_stay_as_they_are() -> None:
    assert refused("a", "b", lines=3) is None
    for names, reset in ((("b", "a"), ()), (("a", "b"), ("a",))):
        error = refused(*names, lines=3, reset_sources=reset)
        assert "several inputs to Spark" in str(error)


@pytest.mark.parametrize("reset", [(), ("b",)])
def test_an_epoch_that_does_not_know_its_sources_is_taken_to_have_the_same(
    reset: tuple[str, ...],
) -> None:
    assert refused("a", "b", held="", reset_sources=reset) is None
    # As the same: where it knows of another, one is gone.
    assert refused("a", "b", held="a c", reset_sources=reset) is not None


def scoped(declared: ScopedState, **options: Any) -> frozenset[str]:
    given = {"job_name": "fraud", "url": "", "allow_dropped_state": False, **options}
    held = epoch(41, entry(uid="score", keys=KEYS, states=HELD.operators["score"].states))
    return check_resume(held, {"score": declared}, **given)


def test_state_of_keys_cannot_become_lists_of_subtasks() -> None:
    lists = ScopedState(
        "score", "subtask", {"subtask": "int"}, {"total": state.OperatorList("long")}
    )
    with pytest.raises(StateSchemaError, match=r"holds state of keys(.|\n)*declares lists of sub"):
        scoped(lists)
    assert scoped(lists, allow_dropped_state=True) == frozenset()


def test_an_operator_without_state_may_get_keys_or_lose_them() -> None:
    held = epoch(41, entry(uid="score", keys=KEYS))
    declared = ScopedState(
        "score", "subtask", {"subtask": "int"}, {"n": state.OperatorList("long")}
    )
    given = {"job_name": "fraud", "url": "", "allow_dropped_state": False}
    assert check_resume(held, {"score": declared}, **given) == frozenset()


# Loops


def looping(*files: Any) -> Any:
    """An epoch with a loop, and what it has in flight."""
    back = entry(
        part(range(8), *files),
        uid="loop:score",
        keys=KEYS,
        states={"records": StateDecl(kind="map", type="struct<k:bigint>", entry_type="bigint")},
    )
    return epoch(41, msgspec.structs.replace(back, scope="feedback"))


def go_on(newest: Any, *entries: ScopedState, **more: Any) -> Any:
    declared = {each.uid: each for each in entries}
    given = {"allow_dropped_state": False, **more}
    return check_resume(newest, declared, job_name="fraud", url="file:///ckpt", **given)


def test_a_loop_with_nothing_in_flight_may_go_or_change() -> None:
    other = ScopedState("loop:score", "feedback", KEYS, {"records": state.Map("bigint", "string")})
    for newest in (looping(), looping(ref("empty", range(8), rows=0))):
        assert go_on(newest) == go_on(newest, other) == frozenset()


def test_records_in_flight_are_not_given_up_unasked() -> None:
    newest = looping(ref("a", range(8), kind="base"))
    with pytest.raises(PlanError, match="records that loop 'loop' sends back to operator 'score'"):
        go_on(newest)
    assert go_on(newest, allow_dropped_state=True) == frozenset()
    other = ScopedState("loop:score", "feedback", KEYS, {"records": state.Map("bigint", "string")})
    with pytest.raises(StateSchemaError, match="next: let the program of before run"):
        go_on(newest, other)
