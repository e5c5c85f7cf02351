"""An operator with a parallelism of its own: its subtasks get all rows, and no state is lost."""

from __future__ import annotations

import pytest

import cairn
from cairn import Job, KeyedProcess, Process, sinks, state
from cairn.driver import spark_driver
from tests.spark.support import epochs, finish, published

ROWS = "k long"
KEYS = 40


class Count(KeyedProcess):
    n = state.Value(int, default=0)

    def process(self, row, ctx):
        self.n.set(self.n.get() + 1)
        return row.k, self.n.get(), ctx.subtask


class Where(Process):
    def process(self, row, ctx):
        return row.k, 0, ctx.subtask


def build(spark, rows, out, few=None, all_=None):
    job = Job("bounded", max_parallelism=16)
    source = job.source("rows", rows.stream(spark))
    schema = "k long, n long, subtask int"
    counted = source.key_by("k").process(Count(), schema=schema, uid="few", parallelism=few)
    others = source.key_by("k").process(Count(), schema=schema, uid="all", parallelism=all_)
    plain = source.process(Where(), schema=schema, uid="plain", parallelism=1)
    counted.sink_to(sinks.Files(str(out / "few")), uid="few_out")
    others.sink_to(sinks.Files(str(out / "all")), uid="all_out")
    plain.sink_to(sinks.Files(str(out / "plain")), uid="plain_out")
    return job


def widths(checkpoint, uid):
    """The number of key groups of each subtask in the newest epoch."""
    return [each.group_count for each in epochs(checkpoint)[-1].operators[uid].ranges]


def seen(folder):
    return {row["subtask"] for row in published(folder)}


@pytest.mark.soak
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_bounded_operator_uses_its_first_subtasks_and_keeps_its_state_under_another_bound(
    spark, make_input, tmp_path, is_pinned, monkeypatch
):
    """Pinned: as on a cluster, rows are joined to the pin table, which has all subtasks."""
    monkeypatch.setattr(spark_driver, "is_cluster", lambda spark: is_pinned)
    rows = make_input(ROWS).add(*[(k,) for k in range(KEYS)])
    at, first, second = tmp_path / "c", tmp_path / "first", tmp_path / "second"
    job = build(spark, rows, first, few=2)
    assert "2 subtasks at most" in job.explain()
    finish(job, at, parallelism=4)
    assert widths(at, "few") == [8, 8, 0, 0] and widths(at, "all") == [4, 4, 4, 4]
    assert seen(first / "few") == {0, 1} and seen(first / "all") == {0, 1, 2, 3}
    assert seen(first / "plain") == {0}
    # Other bounds and another parallelism: every key goes on counting.
    rows.add(*[(k,) for k in range(KEYS)])
    run = finish(build(spark, rows, second, all_=1), at, parallelism=3)
    assert widths(at, "few") == [6, 5, 5] and widths(at, "all") == [16, 0, 0]
    for name in ("few", "all"):
        found = sorted((row["k"], row["n"]) for row in published(second / name))
        assert found == [(k, 2) for k in range(KEYS)], name
    table = cairn.read_state(spark, str(at), "all", "n")
    assert sorted((row.k, row.value) for row in table.collect()) == [(k, 2) for k in range(KEYS)]
    assert run.query_many("all", "n", [3, 7]).values == {3: 2, 7: 2}
