"""A fork: one operator, three sinks, two side outputs. Run once, and exactly once in effect."""

from __future__ import annotations

import collections
import glob
import os

import pytest

from cairn import Job, KeyedProcess, sinks, state
from tests.marks import for_soak
from tests.spark.programs import lots
from tests.spark.support import finish, stored_state

ROWS, KEYS = 600, 40


class Noted(KeyedProcess):
    """Notes each call in a file: a byte, whatever becomes of the attempt."""

    n = state.Value("bigint", default=0)

    def __init__(self, calls):
        self.calls = str(calls)

    def open(self, ctx):
        self.note = os.open(self.calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def process(self, row, ctx):
        os.write(self.note, b".")
        self.n.set(self.n.get() + 1)
        return self.pass_on(row, ctx)

    def pass_on(self, row, ctx):
        return row.k, row.v, self.n.get()


class Fork(Noted):
    """Passes everything on, odd and even numbers also to the sides."""

    def __init__(self, calls, lost, shuffled):
        super().__init__(calls)
        self.lost = str(lost)
        self.shuffled = shuffled

    def pass_on(self, row, ctx):
        if self.shuffled and ctx.epoch > 2 and not os.path.exists(self.lost):
            with open(self.lost, "w") as file:
                for path in glob.glob(self.shuffled):
                    os.remove(path)
                    file.write(path + "\n")
        ctx.output("odd" if row.v % 2 else "even", (row.k, row.v))
        return super().pass_on(row, ctx)


@pytest.mark.parametrize("loses_files", [for_soak(False), True])
def test_forked_operator_runs_once_and_lost_shuffle_files_change_nothing(
    spark, make_input, tmp_path, loses_files
):
    rows = make_input("k bigint, v bigint")
    rows.add_all([[(v % KEYS, v) for v in range(at, ROWS, 3)] for at in range(3)])
    out = {uid: sinks.Collect() for uid in ("one", "two", "three", "odd", "even")}
    lost = tmp_path / "lost"
    # Not of the session, whose settings others may have changed since.
    files = spark.sparkContext.getConf().get("spark.local.dir") + "/blockmgr-*/*/shuffle_*"
    job = Job("fork", max_parallelism=8)
    first = job.source("rows", rows.stream(spark)).key_by("k")
    counted = first.process(
        Noted(tmp_path / "calls"), schema="k bigint, v bigint, n bigint", uid="count"
    )
    fork = counted.key_by("v").process(
        Fork(tmp_path / "forked", lost, files if loses_files else ""),
        schema="k bigint, v bigint, n bigint",
        uid="fork",
    )
    for uid in ("one", "two", "three"):
        fork.sink_to(out[uid], uid=uid)
    for tag in ("odd", "even"):
        fork.side(tag, "k bigint, v bigint").sink_to(out[tag], uid=tag)
    # More subtasks than cores: some have yet to fetch when the files go.
    finish(job, tmp_path / "checkpoint", parallelism=4)

    for uid in ("one", "two", "three"):
        assert sorted(row.v for row in out[uid].rows) == list(range(ROWS))
    assert sorted(row.v for row in out["odd"].rows) == list(range(1, ROWS, 2))
    assert sorted(row.v for row in out["even"].rows) == list(range(0, ROWS, 2))
    stored = stored_state(job, tmp_path / "checkpoint")
    assert stored["count"]["n"] == collections.Counter(v % KEYS for v in range(ROWS))
    assert stored["fork"]["n"] == dict.fromkeys(range(ROWS), 1)
    calls = [(tmp_path / name).stat().st_size for name in ("calls", "forked")]
    if loses_files:
        assert lost.read_text().count("shuffle_") > 4, "nothing was lost"
        assert calls[0] > ROWS, "the operator before has run again"
    else:
        assert calls == [ROWS, ROWS]


class Losing(lots.Keep):
    """Removes the files of all shuffles, once."""

    def __init__(self, lost, files):
        self.lost, self.files = str(lost), files

    def process(self, row, ctx):
        if ctx.epoch > 2 and not os.path.exists(self.lost):
            with open(self.lost, "w") as file:
                for path in glob.glob(self.files):
                    os.remove(path)
                    file.write(path + "\n")
        return super().process(row, ctx)


def test_transform_reads_the_committed_run_of_its_operator_after_shuffle_files_are_lost(
    spark, make_input, tmp_path
):
    rows = make_input(lots.SCHEMA)
    rows.add_all([[(k,) for k in range(at, at + 100)] for at in (0, 100, 200)])
    files = spark.sparkContext.getConf().get("spark.local.dir") + "/blockmgr-*/*/shuffle_*"
    job = lots.build(spark, rows.folder, Losing(tmp_path / "lost", files))
    finish(job, tmp_path / "checkpoint", parallelism=4)
    assert (tmp_path / "lost").read_text().count("shuffle_") > 4, "nothing was lost"
    kept = stored_state(job, tmp_path / "checkpoint")
    assert len(kept["draw"]["lot"]) == 300
    for way in ("direct", "over-2", "over-3"):
        assert kept[way]["lot"] == kept["draw"]["lot"], way
