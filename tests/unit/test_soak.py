"""What the soak must notice, it notices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.soak.events import Events, Row
from tests.soak.reader import Watch, check_prefix
from tests.soak.schedule import DRIVER_POINTS, SINK_POINTS, matrix, schedule


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ({}, None),
        ({0: (3, 3), 1: (5, 5)}, None),
        ({0: (3, 3), 1: (5, 4)}, "4 of the 5 rows of batch 1"),
        ({0: (3, 6)}, "6 of the 3 rows of batch 0"),
        ({0: (3, 3), 2: (5, 5)}, "batch 2 without batch 1"),
    ],
)
def test_reader_notices_parts_of_batches_and_gaps(seen, problem):
    assert check_prefix(seen) == problem


def test_reader_notices_that_batches_go_away():
    seen = {0: (1, 1), 1: (1, 1)}
    watch = Watch("out", SimpleNamespace(batches=lambda: dict(seen)))
    watch.look()
    del seen[1]
    watch.look()
    assert watch.problems == ["out: 1 batches after 2"]


@pytest.fixture
def events(tmp_path):
    made = Events(tmp_path, seed=1)
    made.add(3)
    return made


def published(events):
    """What a job must make of them."""
    counts, sums, rows = {}, {}, []
    for event in events.all:
        counts[event.account] = counts.get(event.account, 0) + 1
        sums[event.account] = sums.get(event.account, 0) + event.amount
        rows.append(Row(*event, counts[event.account], sums[event.account]))
    return rows


def test_rows_that_came_out_once_pass(events):
    rows = published(events)
    events.check_rows(rows)
    events.check_rows(rows + rows[:5], may_repeat=True)
    events.check_latest({row.account: row for row in rows}.values())


@pytest.mark.parametrize(
    ("harm", "noticed"),
    [
        (lambda rows: rows[1:], "are lost"),
        (lambda rows: [*rows, rows[0]], "more than once"),
        (lambda rows: [*rows, rows[0]._replace(id=10**9)], "never went in"),
        (lambda rows: [rows[0]._replace(amount=-1), *rows[1:]], "another row"),
        (lambda rows: [rows[0]._replace(total=-1), *rows[1:]], "went wrong"),
    ],
)
def test_rows_that_are_lost_doubled_or_changed_are_noticed(events, harm, noticed):
    with pytest.raises(AssertionError, match=noticed):
        events.check_rows(harm(published(events)))


def test_repeated_row_with_another_state_is_noticed_where_rows_may_repeat(events):
    rows = published(events)
    with pytest.raises(AssertionError, match="more than once"):
        events.check_rows([*rows, rows[0]._replace(n=99)], may_repeat=True)


def test_latest_row_that_is_not_the_last_is_noticed(events):
    rows = published(events)
    first = {row.account: row for row in reversed(rows)}
    with pytest.raises(AssertionError):
        events.check_latest(first.values())


def test_seed_says_what_is_done_and_when():
    names = ["files", "postgres"]
    assert schedule(7, 60, names, ["files"]) == schedule(7, 60, names, ["files"])
    assert schedule(7, 60, names, ["files"]) != schedule(8, 60, names, ["files"])


def test_matrix_has_every_point_of_every_sink():
    places = matrix(["files", "delta"], ["files"])
    assert set(DRIVER_POINTS) <= set(places)
    assert {f"{point}@files" for point in SINK_POINTS} <= set(places)
    assert "driver.sink.piece@delta" not in places
