"""What differs between two epochs: exactly that, and nothing is read that cannot differ."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cairn.snapshots.reader as reader_module
from cairn.errors import CorruptFileError, RestoreError, StaleEpochError, StateNotFoundError
from cairn.snapshots import StateDiff, diff_epochs
from cairn.snapshots.diff import same_value
from cairn.storage.log import new_nonce
from cairn.storage.manifest import Restore
from tests.unit.snapshots.checkpoints import GONE, UID, Checkpoint, Model, listed, mapped, value

STATES = {"n": value("bigint"), "items": listed("string"), "last": mapped("string", "double")}
EVERYTHING = 1 << 30


def expected(before: Model, after: Model, name: str) -> tuple[Any, Any, Any]:
    """(added, changed, removed) as dicts by key and entry, from the models."""
    old, new = _flat(before[name], name), _flat(after[name], name)
    return (
        {k: new[k] for k in new.keys() - old.keys()},
        {k: (old[k], new[k]) for k in new.keys() & old.keys() if old[k] != new[k]},
        {k: old[k] for k in old.keys() - new.keys()},
    )


def _flat(rows: dict[Any, Any], name: str) -> dict[Any, Any]:
    if name == "last":
        return {(k, entry): v for k, entries in rows.items() for entry, v in entries.items()}
    return {(k, None): tuple(v) if name == "items" else v for k, v in rows.items()}


def found(diff: StateDiff) -> tuple[Any, Any, Any]:
    added = {(e.key, e.entry): e.after for e in diff.added_examples}
    changed = {(e.key, e.entry): (e.before, e.after) for e in diff.changed_examples}
    removed = {(e.key, e.entry): e.before for e in diff.removed_examples}
    assert (diff.added, diff.changed, diff.removed) == (len(added), len(changed), len(removed))
    return added, changed, removed


keys = st.integers(0, 12)
entries = st.sampled_from(["x", "y", "é"])
changes = st.fixed_dictionaries(
    {
        "n": st.dictionaries(keys, st.just(GONE) | st.integers(0, 3), max_size=6),
        "items": st.dictionaries(
            keys, st.just(GONE) | st.lists(st.sampled_from("ab"), max_size=3), max_size=4
        ),
        "last": st.dictionaries(
            keys,
            st.just(GONE)
            | st.dictionaries(entries, st.just(GONE) | st.none() | st.floats(0, 2), min_size=1),
            max_size=4,
        ),
    }
)
steps = st.lists(st.tuples(changes, st.booleans(), st.integers(1, 4)), min_size=2, max_size=5)


@given(steps, st.data())
def test_diff_agrees_with_the_dict_model(steps: Any, data: st.DataObject) -> None:
    checkpoint = Checkpoint(STATES, group_count=6)
    seen = []
    for changed, base, parallelism in steps:
        checkpoint.parallelism = parallelism
        epoch = checkpoint.commit(changed, base=base)
        seen.append((epoch.number, checkpoint.model))
    (a, before), (b, after) = data.draw(st.sampled_from(seen)), data.draw(st.sampled_from(seen))
    diffs = diff_epochs(checkpoint.store, a, b, limit=EVERYTHING)
    assert [(d.operator, d.state, d.only_in) for d in diffs] == [(UID, n, None) for n in STATES]
    for diff in diffs:
        assert found(diff) == expected(before, after, diff.state)


def test_epochs_of_different_lineages_are_compared() -> None:
    checkpoint = Checkpoint(STATES)
    root = checkpoint.commit({"n": {1: 1, 2: 2}})
    model = checkpoint.model
    left = checkpoint.commit({"n": {1: 10, 3: 3}})
    checkpoint.log.append(
        lambda n: Restore(
            number=n, term=checkpoint.term, nonce=new_nonce(), wall_ms=0, epoch=root.number
        )
    )
    checkpoint.model = model
    right = checkpoint.commit({"n": {2: GONE, 4: 4}})
    (diff,) = diff_epochs(checkpoint.store, left.number, right.number, state="n")
    assert found(diff) == ({(4, None): 4}, {(1, None): (10, 1)}, {(2, None): 2, (3, None): 3})


def test_counts_are_exact_beyond_the_limit() -> None:
    checkpoint = Checkpoint(STATES)
    a = checkpoint.commit({"n": dict.fromkeys(range(40), 0)})
    b = checkpoint.commit({"n": {k: 1 if k < 30 else GONE for k in range(20, 60)}})
    (diff,) = diff_epochs(checkpoint.store, a.number, b.number, state="n", limit=2)
    assert (diff.added, diff.changed, diff.removed) == (0, 10, 10)
    assert (len(diff.added_examples), len(diff.changed_examples)) == (0, 2)


def test_pieces_are_aligned_whatever_the_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.snapshots.diff.CHUNK_ROWS", 50)
    checkpoint = Checkpoint(STATES, group_count=32, parallelism=3)
    a = checkpoint.commit({"n": {k: k for k in range(600)}})
    before = checkpoint.model
    checkpoint.parallelism = 5
    b = checkpoint.commit({"n": {k: -k for k in range(300, 900)}}, base=True)
    (diff,) = diff_epochs(checkpoint.store, a.number, b.number, state="n", limit=EVERYTHING)
    assert found(diff) == expected(before, checkpoint.model, "n")


def read_groups(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Filled with the key groups that are read from now on."""
    groups: set[int] = set()
    real = reader_module.EpochReader._read

    def read(self: Any, part: Any, few: range, *more: Any) -> Any:
        groups.update(few)
        return real(self, part, few, *more)

    monkeypatch.setattr(reader_module.EpochReader, "_read", read)
    return groups


def test_ranges_of_equal_version_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(STATES, parallelism=4)
    a = checkpoint.commit({"n": {k: k for k in range(50)}})
    b = checkpoint.commit({"n": {7: 70}}, base=True)
    part = checkpoint.group(7) // 2
    groups = read_groups(monkeypatch)
    (diff,) = diff_epochs(checkpoint.store, a.number, b.number, state="n")
    assert found(diff) == ({}, {(7, None): (7, 70)}, {})
    assert groups == {2 * part, 2 * part + 1}


def test_nothing_is_read_when_only_the_parallelism_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint(STATES, parallelism=4)
    a = checkpoint.commit({"n": {k: k for k in range(50)}})
    checkpoint.parallelism = 3
    b = checkpoint.commit()
    groups = read_groups(monkeypatch)
    assert all(diff.is_empty for diff in diff_epochs(checkpoint.store, a.number, b.number))
    assert groups == set()


def test_of_a_group_that_differs_only_keys_that_may_differ_are_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint(STATES, parallelism=1)
    checkpoint.commit({"n": {k: k for k in range(200)}})
    a = checkpoint.commit({"n": {1: -1}}, base=True)
    checkpoint.commit({"n": {7: 70}})
    b = checkpoint.commit({"n": {8: GONE, 300: 1}, "items": {8: ["x"]}})
    rows = []
    real = reader_module.EpochReader._read

    def read(self: Any, *args: Any) -> Any:
        found = real(self, *args)
        rows.extend(batch.num_rows for batches in found.values() for batch in batches)
        return found

    monkeypatch.setattr(reader_module.EpochReader, "_read", read)
    n, items, _ = diff_epochs(checkpoint.store, a.number, b.number)
    assert found(n) == ({(300, None): 1}, {(7, None): (7, 70)}, {(8, None): 8})
    assert items.added == 1
    assert sum(rows) == 2 + 2 + 1


KEYS: dict[str, list[Any]] = {
    "string": ["", "a", "é", None, "☃"],
    "binary": [b"", b"a", None],
    "double": [0.0, math.nan, math.inf, None, 1.5],
    "boolean": [True, False, None],
    "decimal(4,2)": [Decimal("1.50"), Decimal("-1.00"), None],
    "timestamp": [dt.datetime(2024, 1, 1, tzinfo=dt.UTC), None],
    "array<int>": [(1, None), (), None],
    "struct<a:int,b:double>": [(1, math.nan), (None, 0.0), None],
}


@pytest.mark.parametrize("declared", sorted(KEYS))
def test_keys_of_every_sort_are_told_apart(declared: str) -> None:
    checkpoint = Checkpoint({"n": value("int")}, {"k": declared})
    first, *rest = KEYS[declared]
    a = checkpoint.commit({"n": dict.fromkeys(KEYS[declared], 0)})
    b = checkpoint.commit({"n": {first: GONE, **dict.fromkeys(rest, 1)}})
    (diff,) = diff_epochs(checkpoint.store, a.number, b.number)
    assert (diff.added, diff.changed, diff.removed) == (0, len(rest), 1)
    (back,) = diff_epochs(checkpoint.store, b.number, a.number)
    assert (back.added, back.changed, back.removed) == (1, len(rest), 0)


def test_a_state_that_came_or_went_is_said_with_its_keys() -> None:
    checkpoint = Checkpoint({"n": value("int"), "old": value("int")})
    a = checkpoint.commit({"n": {1: 1}, "old": {1: 1, 2: 2}})
    checkpoint.states = {"n": value("int"), "new": value("string")}
    checkpoint.model["new"] = {}
    b = checkpoint.commit({"new": {5: "e"}})
    diffs = {diff.state: diff for diff in diff_epochs(checkpoint.store, a.number, b.number)}
    assert {name: diff.only_in for name, diff in diffs.items()} == {
        "n": None,
        "new": "after",
        "old": "before",
    }
    assert diffs["n"].is_empty
    assert found(diffs["new"]) == ({(5, None): "e"}, {}, {})
    assert found(diffs["old"]) == ({}, {}, {(1, None): 1, (2, None): 2})


def test_a_dropped_state_is_said_when_no_file_has_changed() -> None:
    checkpoint = Checkpoint({"n": value("int"), "old": value("int")})
    a = checkpoint.commit({"n": {1: 1}, "old": {1: 1}})
    checkpoint.states = {"n": value("int")}
    b = checkpoint.commit()
    _, old = diff_epochs(checkpoint.store, a.number, b.number)
    assert (old.state, old.only_in, old.removed) == ("old", "before", 1)


def test_an_operator_that_came_or_went_is_said() -> None:
    checkpoint = Checkpoint(STATES, uid="first")
    a = checkpoint.commit({"n": {1: 1}})
    checkpoint.uid = "second"
    b = checkpoint.commit({"n": {2: 2}})
    diffs = diff_epochs(checkpoint.store, a.number, b.number, state="n")
    assert [(d.operator, d.only_in, d.added, d.removed) for d in diffs] == [
        ("second", "after", 1, 0),
        ("first", "before", 0, 1),
    ]
    assert [d.operator for d in diff_epochs(checkpoint.store, a.number, b.number, operator="first")]


def test_a_state_of_another_kind_is_one_that_went_and_one_that_came() -> None:
    checkpoint = Checkpoint({"n": value("int")})
    a = checkpoint.commit({"n": {1: 1}})
    changed = Checkpoint({"n": mapped("int", "int")}, store=checkpoint.store)
    changed.model = {"n": {1: {5: 5}}}
    b = changed.commit(base=True)
    before, after = diff_epochs(checkpoint.store, a.number, b.number)
    assert (before.kind, before.only_in, before.removed) == ("value", "before", 1)
    assert (after.kind, after.only_in, after.added) == ("map", "after", 1)


def test_nan_has_not_changed() -> None:
    checkpoint = Checkpoint({"d": value("double"), "s": value("struct<a:double,b:array<double>>")})
    nan = math.nan
    a = checkpoint.commit({"d": {1: nan, 2: nan}, "s": {1: (nan, [nan])}})
    b = checkpoint.commit({"d": {1: nan, 2: 0.0}, "s": {1: (nan, [nan])}})
    doubles, structs = diff_epochs(checkpoint.store, a.number, b.number)
    assert (doubles.added, doubles.changed, doubles.removed) == (0, 1, 0)
    assert structs.is_empty


def test_keys_of_several_columns_are_named() -> None:
    checkpoint = Checkpoint({"n": value("int")}, {"shop": "string", "day": "date"})
    a = checkpoint.commit()
    b = checkpoint.commit({"n": {("x", None): 1}})
    (diff,) = diff_epochs(checkpoint.store, a.number, b.number)
    assert diff.key_names == ["shop", "day"]
    assert diff.added_examples[0].key == ("x", None)


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    checkpoint = Checkpoint(STATES)
    a, b = checkpoint.commit(), checkpoint.commit()
    with pytest.raises(StateNotFoundError, match="found: count"):
        diff_epochs(checkpoint.store, a.number, b.number, operator="counts")
    with pytest.raises(StateNotFoundError, match=r"found: count\.n, count\.items, count\.last"):
        diff_epochs(checkpoint.store, a.number, b.number, state="m")
    with pytest.raises(RestoreError, match="no record 99"):
        diff_epochs(checkpoint.store, a.number, 99)


def test_damage_is_named() -> None:
    checkpoint = Checkpoint(STATES)
    a = checkpoint.commit({"n": {1: 1}})
    b = checkpoint.commit({"n": {1: 2}})
    (path,) = {ref.path for part in a.operators[UID].ranges for ref in part.files}
    checkpoint.store.delete([path])
    with pytest.raises(CorruptFileError, match=path):
        diff_epochs(checkpoint.store, a.number, b.number)


def test_an_epoch_retired_meanwhile_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint(STATES, keep=1)
    a = checkpoint.commit({"n": {1: 1}})
    b = checkpoint.commit({"n": {1: 2}})
    real = reader_module.open_rows

    def collected_first(store: Any, ref: Any, scratch: Any) -> Any:
        for _ in range(50):
            checkpoint.commit({"n": {1: 3}}, base=True)
            checkpoint.collector.after_epoch()
        return real(store, ref, scratch)

    monkeypatch.setattr(reader_module, "open_rows", collected_first)
    with pytest.raises(StaleEpochError, match=f"epoch {a.number} is retired"):
        diff_epochs(checkpoint.store, a.number, b.number)


def test_nan_is_itself() -> None:
    assert same_value((1, math.nan, {"a": math.nan}), (1, math.nan, {"a": math.nan}))
    assert not same_value((1, math.nan), (1, 2.0))
