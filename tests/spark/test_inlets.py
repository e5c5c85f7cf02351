"""Ways into an operator: unkeyed, connected, broadcast, chained; one job and one action each."""

from __future__ import annotations

import collections
import datetime as dt

import pytest

from cairn import Job, KeyedProcess, PlanError, Process, sinks, state
from tests.marks import for_soak
from tests.spark.support import T0, epochs, finish

SEEN = "name string, k bigint, v bigint, subtask int, n int"


def at(seconds):
    return T0 + dt.timedelta(seconds=seconds)


class Both(KeyedProcess):
    """What came in, in order, with a count over all inputs."""

    n = state.Value("int", default=0)

    def on_orders(self, row, ctx):
        return self.note("orders", row.v, ctx)

    def on_payments(self, row, ctx):
        return self.note("payments", row.amount, ctx)

    def note(self, name, v, ctx):
        self.n.set(self.n.get() + 1)
        return name, ctx.key, v, ctx.subtask, self.n.get()


@pytest.mark.parametrize("parallelism", [for_soak(1), 3])
def test_connected_rows_of_a_key_meet_in_one_place_in_event_time_order(
    spark, make_input, tmp_path, parallelism
):
    orders = make_input("id int, at timestamp, v bigint")
    orders.add_all([[(k, at(10 * i), i) for k in range(20)] for i in range(0, 6, 2)])
    payments = make_input("what string, paid timestamp, order_id bigint, amount bigint")
    payments.add_all([[("x", at(10 * i), k, i) for k in range(20)] for i in range(1, 6, 2)])
    job = Job("both", max_parallelism=8)
    left = job.source("o", orders.stream(spark, files_per_epoch=9), event_time="at")
    right = job.source("p", payments.stream(spark, files_per_epoch=9), event_time="paid")
    out = sinks.Collect()
    job.connect(orders=left.key_by("id"), payments=right.key_by("order_id")).process(
        Both(), schema=SEEN, uid="both"
    ).sink_to(out, uid="out")
    finish(job, tmp_path / "checkpoint", parallelism=parallelism)
    by_key = collections.defaultdict(list)
    for name, k, v, _, n in sorted(out.rows, key=lambda row: (row[1], row[4])):
        by_key[k].append((name, v, n))
    expected = [("orders" if i % 2 == 0 else "payments", i, i + 1) for i in range(6)]
    assert by_key == dict.fromkeys(range(20), expected)
    assert len({(k, subtask) for _, k, _, subtask, _ in out.rows}) == 20


class Plus(Process):
    """Stateless: adds, and says where."""

    def __init__(self, amount):
        self.amount = amount

    def process(self, row, ctx):
        assert ctx.key is None
        yield row.name, row.k, row.v + self.amount, ctx.subtask, row.n


@pytest.mark.parametrize("is_forked", [for_soak(False), True])
def test_rows_of_a_source_in_one_partition_are_spread_over_all_subtasks(
    spark, make_input, tmp_path, is_forked
):
    rows = make_input("name string, k bigint, v bigint, n int")
    rows.add(*[("x", k, k, 0) for k in range(50)])
    job = Job("spread", max_parallelism=8)
    source = job.source("rows", rows.stream(spark))
    out, other = sinks.Collect(), sinks.Collect()
    source.process(Plus(0), schema=SEEN, uid="plus").sink_to(out, uid="out")
    if is_forked:
        source.sink_to(other, uid="other")
    finish(job, tmp_path / "checkpoint", parallelism=3)
    found = collections.Counter(subtask for _, _, _, subtask, _ in out.rows)
    assert sorted(found.values()) == [16, 17, 17]
    assert len(other.rows) == (50 if is_forked else 0)


class Tag(KeyedProcess):
    def process(self, row, ctx):
        yield "t", row.k, row.v, ctx.subtask, 0
        if row.v == 0:
            ctx.output("zero", (row.k,))


@pytest.mark.parametrize("chaining", [True, False])
def test_functions_without_keys_give_the_same_chained_or_behind_shuffles(
    spark, make_input, tmp_path, chaining
):
    rows = make_input("k bigint, v bigint").add_all([[(k, k % 7) for k in range(100)]] * 2)
    out, zero, both = sinks.Collect(), sinks.Collect(), sinks.Collect()
    job = Job("chain", max_parallelism=8, chaining=chaining)
    tagged = (
        job.source("rows", rows.stream(spark)).key_by("k").process(Tag(), schema=SEEN, uid="tag")
    )
    tagged.side("zero", "k bigint").sink_to(zero, uid="zero")
    ten = tagged.process(Plus(10), schema=SEEN, uid="ten")
    ten.process(Plus(100), schema=SEEN, uid="hundred").sink_to(out, uid="out")
    united = tagged.union(ten).process(Plus(1000), schema=SEEN, uid="thousand")
    united.union(ten).sink_to(both, uid="both")
    levels = job.graph().levels
    assert [[op.uid for op in level.operators] for level in levels] == (
        [["tag", "ten", "hundred", "thousand"]]
        if chaining
        else [["tag"], ["ten"], ["hundred", "thousand"], []]
    )
    finish(job, tmp_path / "checkpoint", parallelism=2)
    assert sorted((k, v) for _, k, v, _, _ in out.rows) == sorted(
        (k, k % 7 + 110) for k in range(100) for _ in range(2)
    )
    assert sorted((k, v) for _, k, v, _, _ in both.rows) == sorted(
        (k, k % 7 + more) for k in range(100) for more in (10, 1000, 1010) for _ in range(2)
    )
    assert len(zero.rows) == 2 * sum(k % 7 == 0 for k in range(100))
    counted = epochs(tmp_path / "checkpoint")[-1].metrics.operators
    assert {uid: counted[uid].rows_in for uid in ("tag", "ten", "hundred")} == {
        "tag": 100, "ten": 100, "hundred": 100,
    }  # fmt: skip


class Negated(KeyedProcess):
    def process(self, row, ctx):
        return row.k, -row.v


def test_a_source_and_what_comes_out_of_an_operator_are_aggregated_as_one(
    spark, make_input, tmp_path
):
    rows = make_input("k bigint, v bigint").add_all([[(k % 5, k) for k in range(100)]] * 2)
    out = sinks.Collect()
    job = Job("united", max_parallelism=8)
    stream = job.source("rows", rows.stream(spark))
    negated = stream.key_by("k").process(Negated(), schema=stream.schema, uid="negated")
    sums = negated.union(stream).key_by("k").aggregate(n="count(*)", total="sum(v)", uid="sums")
    sums.sink_to(out, uid="out")
    finish(job, tmp_path / "checkpoint", parallelism=2)
    assert sorted(out.rows) == sorted((k, n, 0) for k in range(5) for n in (40, 80))


def test_what_cannot_be_connected_is_refused_at_once(spark, make_input):
    rows = make_input("k bigint, s string, v bigint").add((1, "a", 1))
    job = Job("wrong")
    stream = job.source("rows", rows.stream(spark))
    other = job.source("more", rows.stream(spark))
    for streams, says in [
        ({"a": stream.key_by("k")}, "two streams or more"),
        ({"a": stream.key_by("k"), "b": other}, "is not a keyed stream"),
        ({"a": stream.key_by("k"), "b": other.key_by("s")}, "never meet"),
        ({"a": stream.key_by("k"), "b": other.key_by("k", "s")}, "different numbers"),
        ({"a": stream.key_by("k"), "timer": other.key_by("k")}, "cannot be called"),
    ]:
        with pytest.raises(PlanError, match=says):
            job.connect(**streams)
    both = job.connect(orders=stream.key_by("k"), refunds=other.key_by("k"))
    with pytest.raises(PlanError, match=r"has no on_refunds\(row, ctx\)"):
        both.process(Both(), schema=SEEN, uid="x")
    three = job.connect(
        orders=stream.key_by("k"), payments=other.key_by("k"), more=stream.key_by("v")
    )
    with pytest.raises(PlanError, match="on_more"):
        three.process(Both(), schema=SEEN, uid="x")
    with pytest.raises(PlanError, match="is a KeyedProcess"):
        stream.process(Tag(), schema=SEEN, uid="x")
    with pytest.raises(PlanError, match="is a Process"):
        stream.key_by("k").process(Plus(1), schema=SEEN, uid="x")


class Follow(KeyedProcess):
    """Notes broadcast rows in the order they come, and what was noted when a row came."""

    def open(self, ctx):
        self.noted = []

    def process_broadcast(self, row, ctx):
        assert ctx.key is None
        if row.rule == 0:
            self.noted.clear()
        self.noted.append(row.rule)
        yield "rule", row.rule, len(self.noted), ctx.subtask, ctx.epoch

    def process(self, row, ctx):
        yield "row", row.k, len(self.noted), ctx.subtask, ctx.epoch


@pytest.mark.parametrize("is_timed", [for_soak(False), True])
def test_every_subtask_gets_all_broadcast_rows_first_and_in_one_order(
    spark, make_input, tmp_path, is_timed
):
    rows = make_input("k bigint, at timestamp")
    rows.add_all([[(k, at(k)) for k in range(200)]] * 2)
    rules = make_input("rule bigint, at timestamp")
    # Later rules are earlier in event time.
    rules.add_all([[(i, at(100 - i)) for i in range(40)]] * 2)
    job = Job("rules", max_parallelism=8)
    time = {"event_time": "at"} if is_timed else {}
    events = job.source("rows", rows.stream(spark), **time)
    told = job.source("rules", rules.stream(spark), **time)
    out = sinks.Collect()
    events.key_by("k").broadcast(told).process(Follow(), schema=SEEN, uid="follow").sink_to(
        out, uid="out"
    )
    finish(job, tmp_path / "checkpoint", parallelism=5)
    for epoch, found in out.epochs.items():
        assert {v for name, _, v, _, _ in found if name == "row"} == ({1} if is_timed else {40})
        assert sum(name == "row" for name, *_ in found) == 200
        orders = collections.defaultdict(list)
        for name, rule, _, subtask, _ in found:
            if name == "rule":
                orders[subtask].append(rule)
        expected = list(range(40))[:: -1 if is_timed else 1]
        assert orders == dict.fromkeys(range(5), expected), epoch
