"""The first n rows per key on a Harness, against sorted lists."""

from __future__ import annotations

import decimal
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.errors import PlanError
from cairn.operators import top
from cairn.operators.top import By, Top, check_top, parse_by
from cairn.state import TTL
from cairn.testing import Harness
from cairn.types import parse_schema
from tests.backends import MORE_IN_SOAK
from tests.marks import for_soak
from tests.stored_harness import StoredHarness

DDL = "k string, price double, name string, fee decimal(9,2), at timestamp, n bigint"
SCHEMA = parse_schema(DDL)
ROWS = st.tuples(
    st.none() | st.sampled_from(["", "a longer key than sixteen"]),
    st.none() | st.sampled_from([-math.inf, -1.5, 0.0, 2.0, math.nan]),
    st.none() | st.sampled_from(["", "é", "z" * 40]),
    st.none() | st.sampled_from([decimal.Decimal("1.50"), decimal.Decimal("-2.00")]),
    st.none(),
    st.none() | st.integers(-(2**63), 2**63 - 1),
)
BY = st.sampled_from(
    [
        [By("price", True)],
        [By("price", False)],
        [By("name", True), By("price", False)],
        [By("fee", False), By("n", True)],
        [By("n", False)],
        [By("at", True)],
    ]
)


def harness_of(n: int, by: list[By], *, ttl: TTL | None = None, **options: Any) -> Harness:
    function = Top(n, by, SCHEMA, ttl)
    return StoredHarness(function, DDL, "k", function.schema, **options)


def sortable(value: Any) -> Any:
    """Null first, then by value; NaN last."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value)
    return (1, value)


class Reversed:
    """Sorts the other way round."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: Reversed) -> bool:
        return bool(other.value < self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reversed) and bool(self.value == other.value)


class Model:
    """The first n rows of each key; equal rows are told apart by their serial numbers."""

    def __init__(self, n: int, by: list[By]) -> None:
        self.n, self.by = n, by
        self.best: dict[Any, list[tuple[Any, int]]] = {}
        self.serial = 0

    def run(self, rows: list[Any]) -> Counter[str]:
        before = {key: list(best) for key, best in self.best.items()}
        for row in rows:
            held = self.best.setdefault(row[0], [])
            held.append((row, self.serial))
            self.serial += 1
            held.sort(key=lambda each: (*self._order(each[0]), each[1]))
            del held[self.n :]
        changes: Counter[str] = Counter()
        for key, best in self.best.items():
            old = {serial: rank for rank, (_, serial) in enumerate(before.get(key, []), 1)}
            new = {serial: rank for rank, (_, serial) in enumerate(best, 1)}
            known = {serial: row for row, serial in before.get(key, []) + best}
            for serial, row in known.items():
                if old.get(serial) != new.get(serial):
                    changes[shown(row, new.get(serial))] += 1
        return changes

    def _order(self, row: Any) -> Any:
        names = SCHEMA.names
        by = [
            Reversed(sortable(row[names.index(name)])) if down else sortable(row[names.index(name)])
            for name, down in self.by
        ]
        return (*by, *map(sortable, row))


def shown(row: Any, rank: int | None) -> str:
    return f"{tuple(row)!r} -> {rank}"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows are several parts, and rows that wait are compared with each other."""
    monkeypatch.setattr(top, "PART_ROWS_MAX", 3)


@pytest.mark.parametrize(
    ("backend", "examples"),
    [("heap", 40), ("rocksdb", 10), for_soak("postgres", 10), for_soak("redis", 10)],
)
def test_rows_are_emitted_when_their_rank_changes(backend: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        st.lists(st.lists(st.lists(ROWS, max_size=6), max_size=3), max_size=5),
        st.integers(1, 3),
        BY,
        st.data(),
    )
    def check(epochs: list[list[list[Any]]], n: int, by: list[By], data: st.DataObject) -> None:
        model = Model(n, by)
        with harness_of(n, by, backend=backend) as harness:
            for pushes in epochs:
                if data.draw(st.booleans(), label="fails"):
                    for rows in pushes:
                        harness.push(rows)
                    harness.rollback()
                before = len(harness.outputs)
                for rows in pushes:
                    assert harness.push(rows) == [], "at the end of the epoch, not before"
                harness.snapshot_and_restore(base=data.draw(st.booleans(), label="base"))
                emitted = Counter(shown(row[:-1], row[-1]) for row in harness.outputs[before:])
                assert emitted == model.run([row for rows in pushes for row in rows])
            for key, best in model.best.items():
                held = harness.state("best", key)
                expected = Counter(repr(row) for row, _ in best)
                assert Counter(map(repr, map(tuple, held.values()))) == expected
                assert set(held) == set(range(len(best))), "numbers are used again"

    check()


def row_of(key: str, price: float, n: int = 0) -> tuple[Any, ...]:
    return (key, price, None, None, None, n)


def ranks(rows: list[Any]) -> list[tuple[Any, ...]]:
    return [(row[0], row[1], row[-1]) for row in rows]


def test_a_row_that_is_pushed_out_comes_with_a_null_rank() -> None:
    with harness_of(2, [By("price", True)]) as harness:
        harness.push([row_of("a", 1.0), row_of("a", 2.0)])
        harness.commit()
        assert ranks(harness.outputs) == [("a", 2.0, 1), ("a", 1.0, 2)]
        harness.push([row_of("a", 3.0), row_of("a", 0.5)])
        harness.commit()
        assert ranks(harness.outputs[2:]) == [("a", 3.0, 1), ("a", 2.0, 2), ("a", 1.0, None)]
        harness.push([row_of("a", 2.5), row_of("a", 2.6), row_of("a", 9.0)])
        harness.commit()
        assert ranks(harness.outputs[5:]) == [("a", 9.0, 1), ("a", 3.0, 2), ("a", 2.0, None)]


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
def test_a_key_without_rows_for_the_ttl_is_forgotten(backend: str) -> None:
    with harness_of(2, [By("price", True)], ttl=TTL("1 second"), backend=backend) as harness:
        harness.push([row_of("a", 5.0), row_of("b", 5.0), row_of("b", 6.0)])
        harness.snapshot_and_restore()
        harness.clock.advance_ms(999)
        harness.push(row_of("a", 1.0))
        harness.commit()
        harness.clock.advance_ms(1)
        before = len(harness.outputs)
        harness.push([row_of("a", 0.0), row_of("b", 1.0)])
        harness.snapshot_and_restore()
        assert ranks(harness.outputs[before:]) == [("b", 1.0, 1)]
        assert len(harness.state("best", "b")) == 1


def test_a_smaller_n_removes_rows_when_their_key_gets_one() -> None:
    wide, narrow = Top(3, [By("n", True)], SCHEMA, None), Top(1, [By("n", True)], SCHEMA, None)
    with Harness(wide, DDL, "k", wide.schema) as harness:
        harness.push([row_of("a", 0.0, n) for n in range(3)])
        harness.commit()
        harness.function.n = narrow.n
        harness.push(row_of("a", 0.0, -1))
        harness.commit()
        assert [(row[5], row[-1]) for row in harness.outputs[3:]] == [(1, None), (0, None)]
        assert [row[5] for row in harness.state("best", "a").values()] == [2]


def test_the_order_is_read_from_words() -> None:
    schema = parse_schema("price double, `a b` int, `desc` int, items array<int>")
    assert parse_by("price", schema) == [By("price", False)]
    assert parse_by("price DESC, desc", schema) == [By("price", True), By("desc", False)]
    assert parse_by(["a b desc", "price asc"], schema) == [By("a b", True), By("price", False)]
    assert parse_by("a b", schema) == [By("a b", False)]
    for wrong, found in (
        ("cost desc", "no column 'cost'"),
        ("price down", "no column 'price down'"),
        ("price, price desc", "each once"),
        ([], "one or several columns"),
        ("items", "column 'items' is array<int>"),
    ):
        with pytest.raises(PlanError, match=found):
            parse_by(wrong, schema)


def test_what_cannot_be_ranked_is_refused() -> None:
    for n in (0, -1, True, 1.5):
        with pytest.raises(PlanError, match="must be a positive number"):
            check_top(n, SCHEMA)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="have a column 'rank', and so has the stream"):
        check_top(1, parse_schema("k int, rank int"))
