"""Lists of subtasks on Spark: they are handed out anew while the query runs."""

from __future__ import annotations

import os
import signal

from cairn import Job, Process, sinks, state
from cairn.snapshots import EpochReader
from cairn.storage.store import open_store
from tests.spark.support import epochs, slot_pids


class Notes(Process):
    own = state.OperatorList("bigint")
    all = state.OperatorList("bigint", redistribute="union")

    def process(self, row, ctx):
        self.own.append(row.v)
        self.all.append(row.v)
        return row.v, ctx.subtask, len(self.own)


def lists(checkpoint, name):
    """As they are stored in the newest epoch."""
    epoch = epochs(checkpoint)[-1]
    found = {subtask: [] for subtask in range(len(epoch.operators["notes"].ranges))}
    with EpochReader(open_store(str(checkpoint)), epoch) as reader:
        for batch in reader.rows("notes", name):
            for row in batch.to_pylist():
                found[row["key"]].append((row["entry"]["at"], row["value"]))
    return [[value for _, value in sorted(items)] for items in found.values()]


def joined(parts):
    return [value for part in parts for value in part]


def test_lists_go_from_2_to_5_to_3_subtasks_while_the_query_runs(spark, make_input, tmp_path):
    source = make_input("v bigint")
    job = Job("notes", max_parallelism=8)
    out = sinks.Collect()
    notes = job.source("rows", source.stream(spark)).process(
        Notes(), schema="v bigint, subtask int, n bigint", uid="notes"
    )
    notes.sink_to(out, uid="out")
    checkpoint = tmp_path / "checkpoint"
    with job.start(checkpoint=str(checkpoint), parallelism=2, trigger="50 milliseconds") as run:

        def feed(first, count):
            source.add(*[(v,) for v in range(first, first + count)])
            run.process_all_available()

        feed(0, 40)
        before = lists(checkpoint, "own")
        assert len(before) == 2
        assert sorted(joined(before)) == list(range(40))
        assert lists(checkpoint, "all") == before

        run.rescale(5)
        feed(40, 1)
        five = lists(checkpoint, "own")
        assert [len(part) for part in five if 40 not in part] == [8] * 4
        assert [v for v in joined(five) if v != 40] == joined(before), "in order"
        united = lists(checkpoint, "all")
        assert [[v for v in part if v != 40] for part in united] == [joined(before)] * 5
        assert sum(40 in part for part in united) == 1

        # Every slot is new: what it goes on with has been stored.
        for pid in slot_pids(run._engine.coordinator.run_id).values():
            os.kill(pid, signal.SIGKILL)
        run.rescale(3)
        feed(41, 1)
        three = lists(checkpoint, "own")
        assert sorted(joined(three)) == list(range(42))
        assert [len(part) for part in three if 41 not in part] in ([13, 14], [14, 14])
        everything = {frozenset(part) - {41} for part in lists(checkpoint, "all")}
        assert everything == {frozenset(range(41))}
        assert all(len(set(part)) == len(part) for part in lists(checkpoint, "all"))
    assert sorted(v for v, _, _ in out.rows) == list(range(42))
