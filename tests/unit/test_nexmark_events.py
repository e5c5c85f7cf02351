"""Nexmark's events: shares, sizes and hot keys of the original, and the same rows in every form."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from bench.nexmark_answers import SQL, answers, settle
from bench.nexmark_events import TABLES, slabs, write_events

EVENTS = 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("events")
    write_events(made, EVENTS, rate=1000, seed=1, slab_events=5000)
    return made


def table(folder: Path, name: str) -> pa.Table:
    return pq.read_table(folder / "parquet" / name)


def lines(folder: Path, name: str) -> list[tuple[str, ...]]:
    return [
        tuple(row)
        for file in sorted((folder / name).glob("*.csv"))
        for row in csv.reader(file.open())
    ]


def test_of_fifty_events_one_is_a_person_three_are_auctions_and_46_are_bids(folder: Path) -> None:
    counts = {name: table(folder, name).num_rows for name in TABLES}
    assert counts == {
        "people": EVENTS // 50,
        "auctions": EVENTS * 3 // 50,
        "bids": EVENTS * 46 // 50,
    }


@pytest.mark.parametrize(
    ("name", "fixed", "average"), [("people", 16, 200), ("auctions", 56, 500), ("bids", 32, 100)]
)
def test_rows_have_the_size_of_the_original_on_average(
    name: str, fixed: int, average: int, folder: Path
) -> None:
    rows = table(folder, name)
    texts = [
        pc.sum(pc.binary_length(rows[field.name])).as_py()
        for field in rows.schema
        # The original counts a bid without its channel and url.
        if pa.types.is_string(field.type) and field.name not in ("channel", "url")
    ]
    assert fixed + sum(texts) / rows.num_rows == pytest.approx(average, rel=0.03)


def test_half_of_the_bids_go_to_hot_auctions_and_most_come_from_hot_bidders(folder: Path) -> None:
    bids = table(folder, "bids")
    auctions = bids["auction"].to_numpy() - 1000
    bidders = bids["bidder"].to_numpy() - 1000
    assert np.mean(auctions % 100 == 0) == pytest.approx(0.5, abs=0.03)
    assert np.mean(bidders % 100 == 1) == pytest.approx(0.75, abs=0.03)
    sellers = table(folder, "auctions")["seller"].to_numpy() - 1000
    assert np.mean(sellers % 100 == 0) == pytest.approx(0.75, abs=0.05)


def test_times_never_decrease_and_follow_the_rate(folder: Path) -> None:
    for name in TABLES:
        ms = table(folder, name)["date_time"].cast(pa.int64()).to_numpy() // 1000
        assert np.all(np.diff(ms) >= 0), name
        assert ms[-1] - ms[0] == pytest.approx(EVENTS, rel=0.01), "20 s at 1,000 events a second"


def test_most_auctions_get_a_bid_while_they_are_open(folder: Path) -> None:
    assert len(answers(folder / "parquet", ["q9"])["q9"]) > 0.8 * EVENTS * 3 / 50


def test_halves_and_csv_files_have_the_same_rows_in_order_of_time(folder: Path) -> None:
    for name in TABLES:
        whole, halves = lines(folder / "csv", name), lines(folder / "halves", name)
        assert Counter(whole) == Counter(halves), name
        at = table(folder, name).schema.get_field_index("date_time")
        for file in (folder / "halves" / name).glob("*.csv"):
            times = [int(row[at]) for row in csv.reader(file.open())]
            assert times == sorted(times)
            assert len(times) == pytest.approx(len(whole) / 2, rel=0.05)
        width = len(table(folder, name).schema)
        assert {len(row) for row in whole} == {width}, "no text needs quotes"


def test_same_seed_gives_the_same_events_and_another_seed_does_not() -> None:
    def bids(seed: int) -> pa.Table:
        return next(slabs(2000, rate=1000, seed=seed, slab_events=2000)).tables["bids"]

    assert bids(1).equals(bids(1))
    assert not bids(1).equals(bids(2))


def test_every_query_has_an_answer_for_few_events(folder: Path) -> None:
    assert all(answers(folder / "parquet", SQL).values())


def test_settled_rows_are_the_newest_of_each_key() -> None:
    assert settle("q15", [("a", 1), ("b", 1), ("a", 2)]) == [("a", 2), ("b", 1)]
    assert settle("q19", [("x", 1), ("y", 1), ("x", 2), ("x", None)]) == [("y", 1)]
    assert settle("q0", [("x",), ("x",)]) == [("x",), ("x",)]
