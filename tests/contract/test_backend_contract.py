"""One suite over every backend: rows by state and key group, and nothing between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.backends import Backend
from cairn.backends.cached.backend import CachedBackend
from cairn.backends.contract import ABSENT
from cairn.types.codec import codec
from tests.backends import ALL, make, take_to_database

STATES = {"s": "value", "t": "value", "s1": "reducing", "m": "map", "l": "list"}


@pytest.fixture(params=ALL)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = make(request.param, str(tmp_path / "state"), 64 << 20)
    declare(backend)
    yield backend
    backend.close()


def declare(backend: Backend) -> None:
    for name, kind in STATES.items():
        entries = codec("string") if kind == "map" else None
        backend.open_state(name, kind, codec("string"), codec("string"), entries)


def content(backend: Backend, name: str, group: int) -> dict[Any, Any]:
    found = {}
    for key, held in backend.rows(name, group).items():
        if STATES[name] == "map":
            held = dict(held)
        elif STATES[name] == "list":
            held = list(held)
        found[key] = held
    return found


def test_rows_are_empty_at_first_and_the_same_object_every_time(backend: Backend) -> None:
    rows = backend.rows("s", 3)
    assert content(backend, "s", 3) == {} and len(rows) == 0
    rows.promote({"k": "x"})
    assert backend.rows("s", 3) is rows
    assert content(backend, "s", 3) == {"k": "x"}


def test_states_and_key_groups_share_nothing(backend: Backend) -> None:
    for state in ("s", "t", "s1"):
        for group in (0, 1, 11):
            backend.rows(state, group).promote({"key": f"{state} {group}"})
    for state in ("s", "t", "s1"):
        for group in (0, 1, 11):
            assert content(backend, state, group) == {"key": f"{state} {group}"}


def test_what_went_in_comes_out_and_goes_when_deleted(backend: Backend) -> None:
    rows = backend.rows("s", 0)
    values = {"1": "a", "": "", None: "none", "é\0": "x" * 100_000}
    rows.promote(values)
    assert content(backend, "s", 0) == values
    rows.promote({None: None, "1": "c", "nobody": None})
    assert rows.get("1") == "c" and None not in rows and "" in rows and len(rows) == 3
    assert rows.get("nobody") is None and rows.get("nobody", "d") == "d"
    assert rows["nobody"] is None and rows["1"] == "c"  # type: ignore[index]
    assert content(backend, "s", 0) == {"1": "c", "": "", "é\0": "x" * 100_000}


def test_entries_of_a_map_come_and_go_one_by_one(backend: Backend) -> None:
    rows = backend.rows("m", 0)
    rows.promote({"k": {"a": "1", "b": None}, "other": {"a": "2"}})
    rows.promote({"k": {"a": ABSENT, "c": "3", "never": ABSENT}, "other": {"a": ABSENT}})
    held = rows.get("k")
    assert dict(held) == {"b": None, "c": "3"} and len(held) == 2
    assert held.get("b", ABSENT) is None and held.get("a", ABSENT) is ABSENT
    assert "c" in held and "a" not in held
    assert rows.get("other") is None and "other" not in rows and "k" in rows
    assert len(rows) == 1 and rows.entry_count() == 2
    assert content(backend, "m", 0) == {"k": {"b": None, "c": "3"}}


def test_a_list_keeps_so_many_items_and_takes_the_new_ones(backend: Backend) -> None:
    rows = backend.rows("l", 0)
    rows.promote({"k": (0, ["a", "b", "c"]), "gone": (0, ["x"])})
    rows.promote({"k": (2, ["d"]), "gone": (0, []), "never": (0, [])})
    held = rows.get("k")
    assert list(held) == ["a", "b", "d"] and len(held) == 3 and list(held[:1]) == ["a"]
    assert rows.get("gone") is None and "gone" not in rows and len(rows) == 1
    rows.promote({"k": (3, ["e"])})
    assert content(backend, "l", 0) == {"k": ["a", "b", "d", "e"]}


@pytest.mark.parametrize("where", ["decoded", "written", "changed since"])
def test_a_peek_is_a_copy_of_what_is_held_wherever_it_lies(backend: Backend, where: str) -> None:
    first: dict[str, Any] = {"s": "x", "m": {"a": "1", "b": None}, "l": (0, ["a", "b", "c"])}
    then: dict[str, Any] = {"s": "y", "m": {"a": ABSENT, "c": "3"}, "l": (2, ["d"])}
    gone: dict[str, Any] = {"s": None, "m": {"a": ABSENT, "b": ABSENT}, "l": (0, [])}
    expected: dict[str, Any] = {"s": "x", "m": {"a": "1", "b": None}, "l": ["a", "b", "c"]}
    for name, change in first.items():
        backend.rows(name, 0).promote({"k": change, None: change, "gone": change})
    if where != "decoded":
        take_to_database(backend)
    if where == "changed since":
        expected = {"s": "y", "m": {"b": None, "c": "3"}, "l": ["a", "b", "d"]}
        for name, change in then.items():
            backend.rows(name, 0).promote({"k": change, None: change, "gone": gone[name]})
            if isinstance(backend, CachedBackend):
                for rows in backend.all_rows():
                    rows.rotate()
                    rows.rotate()
    for name, held in expected.items():
        rows = backend.rows(name, 0)
        assert rows.peek("k") == held and rows.peek(None) == held and rows.peek("never") is None
        assert (rows.peek("gone") is None) == (where == "changed since")
        if name != "s":
            rows.peek("k").clear()
            assert rows.peek("k") == held == type(held)(rows.get("k"))


def test_a_dropped_group_starts_empty_and_takes_no_other_with_it(backend: Backend) -> None:
    for name, change in (("s", "x"), ("m", {"e": "x"}), ("l", (0, ["x"]))):
        backend.rows(name, 0).promote({"1": change})
        backend.rows(name, 1).promote({"1": change})
        before = content(backend, name, 1)
        backend.drop(name, 0)
        backend.drop(name, 99)
        backend.drop("nobody", 0)
        assert content(backend, name, 0) == {}
        assert backend.rows(name, 0).get("1") is None
        assert content(backend, name, 1) == before


def test_a_state_declared_with_other_types_starts_empty(backend: Backend) -> None:
    backend.rows("s", 0).promote({"k": "x"})
    backend.open_state("s", "value", codec("string"), codec("string"), None)
    assert content(backend, "s", 0) == {"k": "x"}
    backend.open_state("s", "value", codec("string"), codec("bigint"), None)
    assert content(backend, "s", 0) == {}


def test_a_prefetch_changes_nothing(backend: Backend) -> None:
    backend.rows("s", 0).promote({"k": "x"})
    backend.rows("m", 0).promote({"k": {"e": "x"}})
    list(backend.rows("s", 0).items())
    backend.prefetch([0, 0, 1, 0], ["k", "k", "k", "nobody"])
    assert backend.rows("s", 0).get("k") == "x" and "k" not in backend.rows("s", 1)
    assert content(backend, "m", 0) == {"k": {"e": "x"}}


def test_a_closed_backend_holds_nothing(backend: Backend) -> None:
    backend.rows("s", 0).promote({"1": "x"})
    list(backend.rows("s", 0).items())
    backend.close()
    declare(backend)
    assert backend.rows("s", 0).get("1") is None


def test_many_keys_are_asked_for_together(backend: Backend) -> None:
    rows, maps, lists = backend.rows("s", 0), backend.rows("m", 0), backend.rows("l", 0)
    rows.promote({str(key): f"v{key}" for key in range(50)})
    maps.promote({"k": {"a": "1"}})
    lists.promote({"k": (0, ["x", "y"])})
    take_to_database(backend)
    assert rows.get_many(["7", "nobody", "49"]) == ["v7", None, "v49"]
    held, nobody = maps.get_many(["k", "nobody"])
    assert dict(held) == {"a": "1"} and nobody is None
    held, nobody = lists.get_many(["k", "nobody"])
    assert list(held) == ["x", "y"] and nobody is None
    assert held[1] == "y" and held[-1] == "y"


def test_new_keys_are_those_that_are_not_held(backend: Backend) -> None:
    for name, change in (("s", "v"), ("m", {"a": "1"}), ("l", (0, ["x"]))):
        rows = backend.rows(name, 0)
        assert rows.new_keys(["a", "b"]) == ["a", "b"]
        rows.promote({"a": change})
        assert rows.new_keys(["a", "b"]) == ["b"]
        take_to_database(backend)
        # What only the disk knows may pass for new; what is not there must.
        assert "b" in rows.new_keys(["a", "b"])


def test_a_scan_in_slices_finds_every_key(backend: Backend) -> None:
    written = {f"k{key}" for key in range(40)}
    late = {f"late{key}" for key in range(5)}
    for name, change in (("s", "v"), ("m", {"a": "1", "b": "2"}), ("l", (0, ["x", "y"]))):
        rows = backend.rows(name, 0)
        rows.promote(dict.fromkeys(written, change))
        backend.rows(name, 1).promote({"other group": change})
        take_to_database(backend)
        rows.promote(dict.fromkeys(late, change))
        found, cursor = rows.scan(None, 7)
        while cursor is not None:
            some, cursor = rows.scan(cursor, 7)
            found += some
        assert {key for key, _ in found} == written | late
        for key, held in found:
            if held is not ABSENT:
                assert type(change)(held) == type(change)(rows.get(key))


def test_what_is_repacked_and_compacted_is_what_it_was(backend: Backend) -> None:
    rows = backend.rows("s", 0)
    rows.promote({str(key): f"v{key}" for key in range(5_000)})
    rows.promote(dict.fromkeys(map(str, range(10, 5_000))))
    take_to_database(backend)
    rows.compact()
    backend.compact()
    assert backend.repack([])
    assert content(backend, "s", 0) == {str(key): f"v{key}" for key in range(10)}
    assert backend.rows("s", 0) is rows
