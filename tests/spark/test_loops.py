"""Loops on Spark: what goes around comes to what a batch computation says, whatever happens.

In the simulation loops meet everything that can go wrong. Here they run as users run them,
and the driver dies with records in flight.
"""

from __future__ import annotations

import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.driver.coordinator.rounds import in_flight
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from tests.spark.programs.loops import (
    EDGES,
    ENOUGH,
    PAGES,
    SHARES,
    batch_ranks,
    components,
    ranks,
    union_find,
)
from tests.spark.support import (
    Input,
    Program,
    epochs,
    eventually,
    finish,
    published,
    stored_state,
)


def killed(spark, job, folder, work, point, *arguments):
    arguments = (job, folder, work, *arguments)
    with Program("loops", *arguments, on=spark, CAIRN_CRASH_AT=point) as program:
        program.end()
    assert program.killed, f"not killed at {point}: {program.errors[-2000:]}"
    newest = epochs(work / "checkpoint")[-1]
    assert in_flight(newest) > 0, "the loop was over"
    return newest


def test_components_are_those_of_the_graph_though_the_driver_dies_and_the_job_is_rescaled(
    spark, tmp_path
):
    edges = [(n, n + 1) for n in range(7)] + [(20, 21), (21, 20), (30, 30)]
    rows = Input(tmp_path / "in", EDGES).add(*edges)
    before = killed(spark, "components", rows.folder, tmp_path, "driver.idle.due:2")
    job = components(spark, rows.folder, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    with job.start(
        checkpoint=str(checkpoint), parallelism=3, trigger="200 milliseconds", retained_epochs=100
    ) as run:
        # The sources are silent: what goes on is the loop.
        assert eventually(lambda: epochs(checkpoint)[-1].number > before.number, 60)
        more = [(7, 21), (30, 31)]
        rows.add(*more)
        run.rescale(2)
        run.process_all_available()
        assert run.parallelism == 2
        assert run.metrics().in_flight == 0
    numbers = {len(epoch.operators["spread"].ranges) for epoch in epochs(checkpoint)}
    assert numbers == {2, 3}
    expected = union_find([*edges, *more])
    assert stored_state(job, checkpoint)["spread"]["label"] == expected
    told = [(row["node"], row["label"]) for row in published(tmp_path / "labels")]
    assert len(set(told)) == len(told), "a label was told of twice"
    assert {node: min(label for n, label in told if n == node) for node, _ in told} == expected
    assert verify(open_store(str(checkpoint))).ok


@pytest.mark.soak
def test_ranks_come_to_those_of_a_batch_though_the_driver_dies_between_two_rounds(spark, tmp_path):
    seeds = [(page, 1.0 + page / 10) for page in range(PAGES)]
    rows = Input(tmp_path / "in", SHARES).add(*seeds[:20]).add(*seeds[20:])
    newest = killed(spark, "ranks", rows.folder, tmp_path, "driver.round.ran:8", "--rounds", 5)
    assert newest.timings.rounds == 5
    job = ranks(spark, rows.folder, tmp_path, rounds=5)
    checkpoint = tmp_path / "checkpoint"
    run = finish(job, checkpoint, parallelism=3)
    assert run.metrics().in_flight == 0
    found = stored_state(job, checkpoint)["gather"]["rank"]
    # What was not passed on any more, of all pages, is all that may be missing.
    tolerance = PAGES * ENOUGH * 5
    for page, rank in enumerate(batch_ranks(seeds)):
        assert found[page] == pytest.approx(rank, abs=tolerance), page


def test_an_aggregate_in_a_loop_gets_what_is_sent_back(spark, make_input, tmp_path):
    """Its rows are made into partials on the way in, and on the way back too."""

    class Once(KeyedProcess):
        sent = state.Value("boolean", default=False)

        def process(self, row, ctx):
            if not self.sent.get():
                self.sent.set(True)
                yield row.k + 1, row.total

    rows = make_input("k bigint, v bigint").add((0, 1), (0, 2))
    out = sinks.Collect()
    job = Job("aggregated", max_parallelism=8)

    def body(loop):
        totals = loop.key_by("k").aggregate(uid="totals", total="sum(v)")
        limited = totals.transform(lambda df: df.where("k < 3"))
        return limited.key_by("k").process(Once(), schema="k bigint, v bigint", uid="once"), totals

    source = job.source("rows", rows.stream(spark))
    source.iterate(body, uid="loop", max_rounds_per_epoch=10).sink_to(out, uid="out")
    run = finish(job, tmp_path / "c")
    assert sorted((row.k, row.total) for row in out.rows) == [(n, 3) for n in range(4)]
    assert run.metrics().timings.rounds == 4


def test_rows_that_come_back_meet_rows_of_a_session_in_another_time_zone(
    spark, make_input, tmp_path
):
    """And those of a column that is never null: Spark's rows have types of their own."""

    class Hop(KeyedProcess):
        def process(self, row, ctx):
            ctx.output("seen", (row.k, row.hops))
            return (row.k, row.hops - 1, row.t) if row.hops else None

    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        rows = make_input("k bigint").add((1,), (2,)).add((1,)).add((1,))
        job, out = Job("zones", max_parallelism=8), sinks.Collect()

        def body(loop):
            hop = loop.key_by("k").process(
                Hop(), schema="k bigint, hops bigint, t timestamp", uid="hop"
            )
            return hop, hop.side("seen", "k bigint, hops bigint")

        source = job.source("rows", rows.stream(spark)).transform(
            lambda df: df.selectExpr("k", "2L AS hops", "timestamp_seconds(k) AS t")
        )
        source.iterate(body, uid="loop").sink_to(out, uid="out")
        finish(job, tmp_path / "c")
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    seen = [(1, hops) for hops in range(3)] * 3 + [(2, hops) for hops in range(3)]
    assert sorted(map(tuple, out.rows)) == sorted(seen)
