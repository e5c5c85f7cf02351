"""`latest` and `top` in the graph: columns, event time, and calls that are refused."""

from __future__ import annotations

import pytest

from cairn import Job, PlanError
from cairn.plan.graph import EventTime, Port, port_time
from tests.unit.plan.programs import source

ROW = "k string, v long, ts timestamp"


def test_the_newest_rows_keep_their_event_time_and_ranked_rows_have_none() -> None:
    job = Job("kept")
    rows = source(job, "rows", ROW, event_time="ts")
    newest = rows.key_by("k").latest(uid="newest")
    ranked = rows.top(3, by="v desc", per="k", uid="ranked")
    assert newest.schema == rows.schema
    assert ranked.schema.names == ["k", "v", "ts", "rank"]
    assert port_time(job._nodes, Port("newest")) == EventTime("ts")
    assert port_time(job._nodes, Port("ranked")) is None


def test_a_call_that_cannot_run_is_refused_and_leaves_the_graph_as_it_was() -> None:
    job = Job("kept")
    rows = source(job, "rows", ROW)
    for call, found in (
        (lambda: rows.top(3, by="w", per="k", uid="a"), "no column 'w'"),
        (lambda: rows.top(3, by="v", per="q", uid="a"), "'q'"),
        (lambda: rows.top(0, by="v", per="k", uid="a"), "positive"),
        (lambda: rows.key_by("k").latest(uid="a", ttl="soon"), "soon"),
        (lambda: rows.key_by("k").latest(), "uid"),
    ):
        with pytest.raises(PlanError, match=found):
            call()
    assert list(job._nodes) == ["rows"]
