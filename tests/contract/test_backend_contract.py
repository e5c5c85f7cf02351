"""One suite over every backend: rows by state and key group, and nothing between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cairn.backends import BACKENDS, Backend


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = BACKENDS[request.param]()
    yield backend
    backend.close()


def test_rows_are_empty_at_first_and_the_same_mapping_every_time(backend: Backend) -> None:
    rows = backend.rows("s", 3)
    assert dict(rows) == {}
    rows[1] = "x"
    assert backend.rows("s", 3) is rows
    assert dict(backend.rows("s", 3)) == {1: "x"}


def test_states_and_key_groups_share_nothing(backend: Backend) -> None:
    for state in ("s", "t", "s1"):
        for group in (0, 1, 11):
            backend.rows(state, group)["key"] = (state, group)
    for state in ("s", "t", "s1"):
        for group in (0, 1, 11):
            assert dict(backend.rows(state, group)) == {"key": (state, group)}


def test_what_went_in_comes_out_and_goes_when_deleted(backend: Backend) -> None:
    rows = backend.rows("s", 0)
    values = {1: "a", "k": b"b", (1, None): (2.5, None), None: {"entry": 1}}
    rows.update(values)
    assert dict(rows) == values
    del rows[None]
    rows[1] = "c"
    assert rows[1] == "c" and None not in rows and len(rows) == 3
    assert rows.get("nobody") is None


def test_a_dropped_group_starts_empty_and_takes_no_other_with_it(backend: Backend) -> None:
    backend.rows("s", 0)[1] = "x"
    backend.rows("s", 1)[1] = "y"
    backend.rows("t", 0)[1] = "z"
    backend.drop("s", 0)
    backend.drop("s", 99)
    backend.drop("nobody", 0)
    assert dict(backend.rows("s", 0)) == {}
    assert dict(backend.rows("s", 1)) == {1: "y"}
    assert dict(backend.rows("t", 0)) == {1: "z"}


def test_a_closed_backend_holds_nothing(backend: Backend) -> None:
    backend.rows("s", 0)[1] = "x"
    backend.close()
    assert dict(backend.rows("s", 0)) == {}
