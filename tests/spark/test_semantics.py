"""What a job computes: graphs of every shape, in any parallelism, over restarts."""

from __future__ import annotations

import collections
import itertools
import operator
import random
import time

import pytest

from cairn import Job, KeyedProcess, sinks, state
from tests.spark.support import epochs, eventually, finish, published, stored_state

ROWS = "k bigint, g string, v bigint"


class Tally(KeyedProcess):
    """Count and sum of one column per key; emits (id of the row, key, count, sum)."""

    n = state.Value("bigint", default=0)
    total = state.Reducing("bigint", operator.add)

    def __init__(self, column="v", calls=None):
        self.column = column
        self.calls = calls

    def process(self, row, ctx):
        self.n.set(self.n.get() + 1)
        self.total.add(row[self.column])
        if self.calls is not None:
            with open(self.calls, "a") as file:
                file.write("x")
        if self.calls is not None and row[self.column] % 10 == 0:
            ctx.output("tens", (row[self.column],))
        yield {"key": str(ctx.key), "n": self.n.get(), "total": self.total.get()}


TALLY = "key string, n bigint, total bigint"


def tally(rows, key):
    """{key: (count, sum)} as plain Python sees it."""
    found = collections.defaultdict(lambda: (0, 0))
    for row in rows:
        n, total = found[key(row)]
        found[key(row)] = (n + 1, total + row[2])
    return dict(found)


def last(rows):
    """The last word of a tally per key."""
    found = {}
    for row in rows:
        if row.n > found.get(row.key, (0, 0))[0]:
            found[row.key] = (row.n, row.total)
    return found


def random_rows(count, seed):
    chance = random.Random(seed)
    return [
        (chance.randrange(10), chance.choice("abc"), chance.randrange(100)) for _ in range(count)
    ]


def held(stored, uid):
    """{key: (count, sum)} as the checkpoint has it."""
    n, total = stored[uid]["n"], stored[uid]["total"]
    return {str(key): (n[key], total[key]) for key in n}


def test_graph_with_every_kind_of_edge_runs_each_operator_once_over_each_row(
    spark, make_input, tmp_path
):
    a_rows = [random_rows(40, seed) for seed in range(3)]
    b_rows = [random_rows(25, seed) for seed in range(10, 13)]
    a = make_input(ROWS).add_all(a_rows)
    b = make_input(ROWS).add_all(b_rows)
    calls = tmp_path / "calls"
    out = {
        name: sinks.Collect()
        for name in ("raw", "raw_b", "sums", "sums_too", "tens", "groups", "later", "joined", "pre")
    }

    def build():
        job = Job("shapes", max_parallelism=16)
        left = job.source("a", a.stream(spark))
        right = job.source("b", b.stream(spark))
        # Straight from a source to a sink, and a source forked four ways.
        left.sink_to(out["raw"], uid="raw")
        right.sink_to(out["raw_b"], uid="raw_b")
        groups = left.key_by("g").process(Tally(), schema=TALLY, uid="groups")
        groups.sink_to(out["groups"], uid="groups_out")
        # Two sources united; the operator feeds two sinks, a side output and a transform.
        sums = left.union(right).key_by("k").process(Tally(calls=calls), schema=TALLY, uid="sums")
        sums.sink_to(out["sums"], uid="sums_out")
        sums.sink_to(out["sums_too"], uid="sums_too_out")
        tens = sums.side("tens", "v bigint")
        tens.sink_to(out["tens"], uid="tens_out")
        even = sums.transform(lambda df: df.where("n % 2 = 0").selectExpr("key", "n AS v"))
        later = even.key_by("key").process(Tally(), schema=TALLY, uid="later")
        later.sink_to(out["later"], uid="later_out")
        # An edge that skips a level: source b goes straight to the third level.
        shaped = later.transform(lambda df: df.selectExpr("key AS g", "n AS v"))
        joined = shaped.union(right.transform(lambda df: df.select("g", "v")))
        joined.key_by("g").process(Tally(), schema=TALLY, uid="joined").sink_to(
            out["joined"], uid="joined_out"
        )
        # Transformed before keying, per epoch.
        pre = left.transform(lambda df: df.groupBy("g").sum("v").toDF("g", "v"))
        pre.key_by("g").process(Tally(), schema=TALLY, uid="pre").sink_to(out["pre"], uid="pre_out")
        return job

    job = build()
    run = finish(job, tmp_path / "checkpoint")
    all_a = list(itertools.chain(*a_rows))
    all_b = list(itertools.chain(*b_rows))
    assert sorted(map(tuple, out["raw"].rows)) == sorted(all_a)
    assert sorted(map(tuple, out["raw_b"].rows)) == sorted(all_b)
    by_key = {str(k): v for k, v in tally(all_a + all_b, lambda r: r[0]).items()}
    assert last(out["sums"].rows) == by_key
    assert sorted(out["sums"].rows) == sorted(out["sums_too"].rows)
    assert len(out["sums"].rows) == len(all_a + all_b)
    assert sorted(r.v for r in out["tens"].rows) == sorted(
        r[2] for r in all_a + all_b if r[2] % 10 == 0
    )
    assert last(out["groups"].rows) == tally(all_a, lambda r: r[1])
    # Even counts of each key: 2 + 4 + … up to its last.
    evens = {k: (n // 2, sum(range(2, n + 1, 2))) for k, (n, _) in by_key.items() if n > 1}
    assert last(out["later"].rows) == evens
    later_rows = [(0, k, i) for k, (n, _) in evens.items() for i in range(1, n + 1)]
    assert last(out["joined"].rows) == tally(later_rows + all_b, lambda r: r[1])
    per_epoch = [
        (0, g, total) for rows in a_rows for g, (_, total) in tally(rows, lambda r: r[1]).items()
    ]
    assert last(out["pre"].rows) == tally(per_epoch, lambda r: r[1])
    # Once each: by what the function did, and by what was counted.
    assert calls.stat().st_size == len(all_a + all_b)
    rows_in = collections.Counter()
    for epoch in run.epochs():
        rows_in.update({uid: op.rows_in for uid, op in epoch.operators.items()})
    assert rows_in == {
        "groups": len(all_a),
        "sums": len(all_a + all_b),
        "later": sum(n for n, _ in evens.values()),
        # A transform in the slot of `later`. Spark runs the others.
        "transform:13": len(later_rows),
        "joined": len(later_rows + all_b),
        "pre": len(per_epoch),
    }
    stored = stored_state(job, tmp_path / "checkpoint")
    assert held(stored, "sums") == by_key
    assert held(stored, "later") == evens

    # And it goes on where it was.
    more = random_rows(20, 99)
    a.add(*more)
    finish(build(), tmp_path / "checkpoint", parallelism=3)
    assert last(out["groups"].rows) == tally(all_a + more, lambda r: r[1])
    assert (
        last(out["sums"].rows).items()
        <= {str(k): v for k, v in tally(all_a + all_b + more, lambda r: r[0]).items()}.items()
    )


@pytest.mark.slow
def test_result_per_key_is_the_same_in_any_parallelism_and_equals_spark_sql(
    spark, make_input, tmp_path
):
    files = [random_rows(60, seed) for seed in range(2)]
    rows = make_input(ROWS).add_all(files)

    def build(name):
        job = Job("any", max_parallelism=16)
        source = job.source("rows", rows.stream(spark))
        sums = source.key_by("k", "g").process(Tally(), schema=TALLY, uid="sums")
        sums.sink_to(sinks.Files(tmp_path / name / "out"), uid="out")
        return job

    batch = spark.read.parquet(str(rows.folder)).groupBy("k", "g").agg({"*": "count", "v": "sum"})
    expected = {(r["k"], r["g"]): (r["count(1)"], r["sum(v)"]) for r in batch.collect()}
    outputs = []
    for parallelism in (1, 2, 5):
        name = str(parallelism)
        job = build(name)
        finish(job, tmp_path / name / "checkpoint", parallelism=parallelism)
        stored = stored_state(job, tmp_path / name / "checkpoint")["sums"]
        found = {tuple(k): (stored["n"][k], stored["total"][k]) for k in stored["n"]}
        assert found == expected
        outputs.append(sorted((r["key"], r["n"]) for r in published(tmp_path / name / "out")))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.slow
def test_restart_in_other_parallelism_keeps_every_key(spark, make_input, tmp_path):
    """Ten epochs before the first change: then deltas are due to be merged just when it happens."""
    rows = make_input(ROWS)
    told = []
    job = Job("rescaled", max_parallelism=16)
    source = job.source("rows", rows.stream(spark))
    source.key_by("k").process(Tally(), schema=TALLY, uid="sums")
    for parallelism, epoch_count in ((2, 10), (4, 2), (1, 1), (5, 1)):
        for seed in range(epoch_count):
            told.append(random_rows(30, 100 * parallelism + seed))
            rows.add(*told[-1])
        finish(job, tmp_path / "checkpoint", parallelism=parallelism)
        expected = tally(itertools.chain(*told), lambda r: r[0])
        stored = held(stored_state(job, tmp_path / "checkpoint"), "sums")
        assert stored == {str(k): v for k, v in expected.items()}, f"after {parallelism}"


class Swap(KeyedProcess):
    """Emits rows whose columns are declared in another order than those it unites with."""

    def process(self, row, ctx):
        yield {"k": row.k, "g": row.g, "v": row.v}


def test_streams_unite_by_column_name_whatever_their_order_and_nullability(
    spark, make_input, tmp_path
):
    a = make_input("k bigint not null, g string, v bigint").add((1, "a", 1), (2, "b", 2))
    b = make_input("v bigint, g string, k bigint").add((3, "c", None), (4, None, 1))
    totals, straight, early = sinks.Collect(), sinks.Collect(), sinks.Collect()
    job = Job("united", max_parallelism=8)
    left, right = job.source("a", a.stream(spark)), job.source("b", b.stream(spark))
    one = left.key_by("k").process(Swap(), schema="k bigint not null, g string, v bigint", uid="o")
    two = right.key_by("v").process(Swap(), schema="v bigint, g string, k bigint", uid="t")
    both = one.union(two)
    both.key_by("g").process(
        type("Same", (Swap,), {})(), schema="g string, k bigint, v bigint", uid="same"
    ).sink_to(totals, uid="totals")
    both.sink_to(straight, uid="straight")
    left.union(right).sink_to(early, uid="early")
    finish(job, tmp_path / "checkpoint")
    expected = [(1, "a", 1), (2, "b", 2), (None, "c", 3), (1, None, 4)]
    for out in (totals, straight, early):
        assert sorted(((r.k, r.g, r.v) for r in out.rows), key=lambda r: r[2]) == expected


def test_one_sink_of_two_outputs_of_an_operator_gets_both(spark, make_input, tmp_path):
    class Two(KeyedProcess):
        def process(self, row, ctx):
            ctx.output("side", {"v": row.k + 100, "k": row.k})
            yield row.k, row.k

    out = sinks.Files(tmp_path / "out")
    job = Job("both", max_parallelism=8)
    main = job.source("rows", make_input("k bigint").add((1,), (2,)).stream(spark))
    main = main.key_by("k").process(Two(), schema="k bigint, v bigint", uid="two")
    main.union(main.side("side", "v bigint, k bigint")).sink_to(out, uid="out")
    finish(job, tmp_path / "checkpoint")
    found = sorted((row["k"], row["v"]) for row in published(tmp_path / "out"))
    assert found == [(1, 1), (1, 101), (2, 2), (2, 102)]


def test_names_of_the_user_do_not_meet_names_of_ours(spark, make_input, tmp_path):
    """A source called as a transform might be; columns called as the envelope's are."""
    columns = "lane bigint, `group` string, subtask int, pin int, time int, tie int, ack binary"
    rows = make_input(columns + ", source int, l0 int")
    rows.add((1, "a", 2, 3, 4, 5, b"6", 7, 8))
    other = make_input("k bigint").add((1,))
    out = sinks.Collect()
    job = Job("names", max_parallelism=8)
    source = job.source("transform-1", rows.stream(spark))
    job.source("other", other.stream(spark)).sink_to(sinks.Noop(), uid="transform-2")

    class Echo(KeyedProcess):
        def process(self, row, ctx):
            yield row

    echoed = (
        source.transform(lambda df: df.where("source = 7"))
        .key_by("lane", "group")
        .process(Echo(), schema=columns + ", source int, l0 int", uid="transform-3")
    )
    echoed.transform(lambda df: df.where("l0 = 8")).key_by("ack").process(
        Echo(), schema=columns + ", source int, l0 int", uid="again"
    ).sink_to(out, uid="out")
    run = finish(job, tmp_path / "checkpoint")
    assert [tuple(row) for row in out.rows] == [(1, "a", 2, 3, 4, 5, b"6", 7, 8)]
    # Two operators, the transform between them, and the sink that drops the other source's row.
    assert [epoch.rows_in for epoch in run.epochs()] == [4]


def test_sinks_that_write_the_same_rows_into_one_folder_lose_none(spark, make_input, tmp_path):
    """Files are named by content: equal content of two sinks, or twice from one, is still two."""
    rows = make_input("k bigint").add(*[(1,)] * 4000)
    job = Job("same", max_parallelism=8)

    class Echo(KeyedProcess):
        def process(self, row, ctx):
            yield row

    echo = (
        job.source("rows", rows.stream(spark))
        .key_by("k")
        .process(Echo(), schema="k bigint", uid="echo")
    )
    for uid in ("first", "second"):
        echo.sink_to(sinks.Files(tmp_path / "out", file_bytes_target=1), uid=uid)
    finish(job, tmp_path / "checkpoint")
    assert len(published(tmp_path / "out")) == 8000


SINK_MODULE = """
from cairn.sinks import Collect

class Mine(Collect):
    pass
"""


def test_sink_of_the_users_own_module_beside_the_program_is_found_in_the_slots(
    spark, make_input, tmp_path, monkeypatch
):
    (tmp_path / "beside_the_program.py").write_text(SINK_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import beside_the_program

    out = beside_the_program.Mine()
    job = Job("beside", max_parallelism=8)
    job.source("rows", make_input("k bigint").add((1,)).stream(spark)).sink_to(out, uid="out")
    finish(job, tmp_path / "checkpoint", parallelism=1)
    assert [tuple(row) for row in out.rows] == [(1,)]


def test_checkpoint_and_output_may_have_any_name(spark, make_input, tmp_path):
    """Large deltas, so that slots write files of their own; then they are read back."""
    name = "with space ünï 100%25 #1?x=[y]"
    rows = make_input("k bigint, v bigint").add(*[(k, 1) for k in range(6000)])
    job = Job("named", max_parallelism=8)
    source = job.source("rows", rows.stream(spark))
    sums = source.key_by("k").process(Tally(), schema=TALLY, uid="sums")
    sums.sink_to(sinks.Files(tmp_path / name / "out"), uid="out")
    finish(job, tmp_path / name / "checkpoint", parallelism=1)
    rows.add((0, 1), (5999, 1))
    finish(job, tmp_path / name / "checkpoint", parallelism=2)
    stored = stored_state(job, tmp_path / name / "checkpoint")["sums"]["n"]
    assert len(stored) == 6000 and stored[0] == stored[5999] == 2
    assert len(published(tmp_path / name / "out")) == 6002
    assert {path.name for path in tmp_path.iterdir()} == {name, "input-0"}


def test_jobs_run_side_by_side_in_one_session_and_can_be_watched(spark, make_input, tmp_path):
    rows = make_input("k bigint, v bigint").add_all([[(k, 1) for k in range(5)]] * 4)
    runs, watched = [], []
    for name in ("left", "right"):
        job = Job(name, max_parallelism=8)
        source = job.source("rows", rows.stream(spark))
        source.key_by("k").process(Tally(), schema=TALLY, uid="sums")
        runs.append(
            job.start(checkpoint=str(tmp_path / name), parallelism=1, trigger="available-now")
        )
    while not all(run.wait(0) for run in runs):
        watched += [len(run.epochs()) for run in runs]
    for run in runs:
        assert run.status == "finished" and len(run.epochs()) == 4
        held = run.metrics()
        assert (held.state_keys, held.state_entries) == (5, 10)
        assert [epoch.rows_in for epoch in run.epochs()] == [5] * 4
    assert watched


def test_stop_lets_the_epoch_under_way_finish_and_the_next_start_goes_on(
    spark, make_input, tmp_path
):
    class Slow(KeyedProcess):
        n = state.Value("bigint", default=0)

        def process(self, row, ctx):
            (tmp_path / "begun").touch()
            time.sleep(1)
            self.n.set(self.n.get() + 1)
            yield row

    rows = make_input("k bigint").add((1,)).add((1,)).add((1,))
    job = Job("slow", max_parallelism=8)
    source = job.source("rows", rows.stream(spark))
    source.key_by("k").process(Slow(), schema="k bigint", uid="slow").sink_to(
        sinks.Files(tmp_path / "out"), uid="out"
    )
    at = tmp_path / "checkpoint"
    with job.start(checkpoint=str(at), parallelism=1, trigger="0 seconds") as run:
        assert eventually((tmp_path / "begun").exists)
        assert run.wait(timeout=0) is False and run.is_active
    assert run.status == "stopped" and run.error is None
    assert run.wait() is True
    done = len(epochs(at))
    assert done in (1, 2) and len(published(tmp_path / "out")) == done
    finish(job, at, parallelism=1)
    assert stored_state(job, at)["slow"]["n"] == {1: 3}
    assert len(published(tmp_path / "out")) == 3
