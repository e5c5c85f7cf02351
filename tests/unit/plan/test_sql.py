"""The columns that a level is fed: only those that its shuffle, its order or Python needs."""

from __future__ import annotations

from typing import Any

import pytest

from cairn import Job, Process, sinks
from cairn.errors import PlanError
from cairn.plan.deploy import job_spec, outgoing
from cairn.plan.sql import Feed
from tests.unit.plan.programs import ROW, Pass, process, source


@pytest.fixture
def job() -> Job:
    return Job("j", max_parallelism=16)


class Plain(Process[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


def feeds(job: Job, *, is_pinned: bool = False) -> list[Feed]:
    graph = job.graph()
    return [Feed(graph, level, 4, is_pinned) for level in graph.levels]


def test_rows_of_one_keyed_edge_travel_with_their_group_alone(job: Job) -> None:
    process(process(source(job, "s"), "a"), "b")
    first, second = feeds(job)
    assert first.columns == first.sent == ["group", "c0", "c1"]
    assert second.columns == second.sent == ["group", "c0", "c1", "ack"]
    assert first.subtask == "coalesce(cast(`group` * 4 div 16 AS int), 0)"


def test_spark_alone_gets_the_tie_and_the_subtask(job: Job) -> None:
    process(source(job, "s", event_time="v"), "a")
    (feed,) = feeds(job, is_pinned=True)
    assert feed.columns == ["group", "subtask", "time", "tie", "c0", "c1"]
    assert feed.sent == ["group", "time", "c0", "c1"]


def test_rows_name_their_lane_only_where_there_are_several(job: Job) -> None:
    rows = source(job, "s")
    process(rows, "a")
    process(rows, "b", key="v")
    (feed,) = feeds(job)
    assert feed.columns == ["lane", "group", "c0", "c1"]


def test_rows_without_keys_go_straight_unless_subtasks_are_pinned(job: Job) -> None:
    rows = source(job, "s", event_time="v")
    rows.sink_to(sinks.Collect(), uid="out")
    rows.process(Plain(), schema="k long", uid="plain")
    (feed,) = feeds(job)
    assert feed.is_straight and feed.columns == ["lane", "time", "tie", "c0", "c1"]
    (pinned,) = feeds(job, is_pinned=True)
    assert not pinned.is_straight and "subtask" in pinned.columns


def test_sinks_need_no_event_time(job: Job) -> None:
    source(job, "s", event_time="v").sink_to(sinks.Collect(), uid="out")
    (feed,) = feeds(job)
    assert feed.columns == ["c0", "c1"]


def test_rows_that_pass_a_level_have_a_lane_and_a_subtask_there(job: Job) -> None:
    rows = source(job, "s")
    process(process(rows, "a").union(rows), "b")
    first, second = feeds(job)
    assert first.columns == ["lane", "group", "subtask", "c0", "c1"]
    assert second.columns == ["group", "c0", "c1", "ack"]


def test_rows_that_pass_a_level_bypass_its_slots(job: Job) -> None:
    rows = source(job, "s", "k long, v long")
    wide = process(source(job, "t", "k string, v long"), "a")
    process(process(rows, "b").union(rows), "c")
    process(wide, "d")
    feed = feeds(job)[0]
    out = outgoing(feed.graph, feed.level)
    (lane,) = feed.passing
    assert feed.is_passing == f"lane IN ({lane})"
    names = dict(zip(out.names[lane], feed.envelope.names[lane], strict=True))
    expected = {"lane": "lane", "ack": "cast(null AS binary)"} | names
    found = dict(each.split(" AS ")[::-1] for each in feed.pass_on(out) if "null" not in each)
    assert found == {name: sql for name, sql in expected.items() if "null" not in sql}
    assert [each.rsplit(" AS ", 1)[1] for each in feed.pass_on(out)] == out.schema.names


def test_slots_take_their_own_rows_and_acknowledgements(job: Job) -> None:
    rows = source(job, "s")
    process(process(rows, "a").union(rows), "b")
    first, second = feeds(job)
    (lane,) = first.passing
    assert first.is_taken == f"lane IS NULL OR NOT lane IN ({lane})"
    assert second.passing == []


def test_pinned_rows_pass_a_level_in_the_forwarder(job: Job) -> None:
    rows = source(job, "s")
    process(process(rows, "a").union(rows), "b")
    assert [feed.passing for feed in feeds(job, is_pinned=True)] == [[], []]


def test_acknowledgements_of_a_single_lane_go_where_rows_of_a_null_key_go(job: Job) -> None:
    process(process(source(job, "s"), "a"), "b")
    graph = job.graph()
    feed = feeds(job)[1]
    columns = feed.label({1: {"k": "c0", "v": "c1"}}, {1: graph.edges[1]}, has_acks=True)
    assert columns == [
        "CAST(pmod(xxhash64(c0), 16L) AS INT) AS `group`",
        "cast(c0 AS bigint) AS `c0`",
        "cast(c1 AS bigint) AS `c1`",
        "ack AS `ack`",
    ]


def test_a_column_that_all_lanes_have_in_one_place_depends_on_no_lane(job: Job) -> None:
    first, second = source(job, "s", "k long, v long"), source(job, "t", "k long, w string")
    process(first, "a")
    process(second, "b", schema="k long, w string")
    graph = job.graph()
    (feed,) = feeds(job)
    fields = {0: {"k": "c0", "v": "c1"}, 1: {"w": "c2", "k": "c0"}}
    columns = feed.label(fields, dict(enumerate(graph.edges)), has_acks=False)
    assert columns[2:] == [
        "cast(c0 AS bigint) AS `c0`",
        "cast(c1 AS bigint) AS `c1`",
        "cast(c2 AS string) AS `c2`",
    ]
    assert (
        columns[0] == "CASE lane WHEN 0 THEN 0 WHEN 1 THEN 1 ELSE cast(null AS int) END AS `lane`"
    )


def test_rows_of_a_bounded_operator_go_to_its_first_subtasks(job: Job) -> None:
    rows = source(job, "s")
    rows.key_by("k").process(Pass(), schema=ROW, uid="few", parallelism=2)
    (feed,) = feeds(job)
    fields = {0: {"k": "c0", "v": "c1"}}
    columns = feed.label(fields, dict(enumerate(job.graph().edges)), has_acks=False)
    key = "CAST(pmod(xxhash64(c0), 16L) AS INT)"
    assert columns[1] == f"coalesce(cast({key} * 2 div 16 AS int), 0) AS `subtask`"
    assert feed.sent == ["group", "c0", "c1"], "Python does not need the subtask"
    assert feed.checked_starts == (0, 8, 16, 16)
    process(rows, "all")
    (feed,) = feeds(job)
    assert feed.checked_starts is None, "ranges differ by lane"


def test_rows_without_keys_are_shuffled_to_a_bounded_operator(job: Job) -> None:
    rows = source(job, "s").process(Plain(), schema=ROW, uid="plain", parallelism=1)
    rows.process(Plain(), schema=ROW, uid="later", parallelism=2)
    first, second = feeds(job)
    assert not first.is_straight and "subtask" in first.columns
    fields, edges = {1: {"k": "c0", "v": "c1"}}, {1: job.graph().edges[1]}
    found = second.label(fields, edges, has_acks=True)
    assert "pmod(pmod(spark_partition_id(), 4), 2) AS `subtask`" in found


def test_a_bound_of_its_own_ends_a_chain(job: Job) -> None:
    rows = source(job, "s").key_by("k").process(Pass(), schema=ROW, uid="few", parallelism=2)
    rows.process(Plain(), schema=ROW, uid="here")
    rows.process(Plain(), schema=ROW, uid="same", parallelism=2)
    rows.process(Plain(), schema=ROW, uid="other", parallelism=3)
    assert job.graph().chained == {"here", "same"}


@pytest.mark.parametrize("bad", [0, -1, True, "2"])
def test_a_parallelism_that_is_no_number_of_subtasks_is_refused(job: Job, bad: Any) -> None:
    with pytest.raises(PlanError, match="expected: the number of subtasks"):
        source(job, "s").key_by("k").process(Pass(), schema=ROW, uid="few", parallelism=bad)


def test_a_chained_operator_without_keys_gets_rows_where_those_before_it_do(job: Job) -> None:
    few = source(job, "s").key_by("k").process(Pass(), schema=ROW, uid="few", parallelism=2)
    all_ = source(job, "t").key_by("k").process(Pass(), schema=ROW, uid="all")
    here = few.process(Plain(), schema=ROW, uid="here")
    here.process(Plain(), schema=ROW, uid="after")
    here.union(all_).process(Plain(), schema=ROW, uid="anywhere")
    here.key_by("v").process(Pass(), schema=ROW, uid="shuffled")
    spec = job_spec(job.graph(), job_id="", checkpoint="memory:", backend="heap")
    found = {op.uid: op.parallelism for level in spec.levels for op in level.operators}
    assert found == {"few": 2, "all": 0, "here": 2, "after": 2, "anywhere": 0, "shuffled": 0}
