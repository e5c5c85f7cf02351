"""Rules that are broadcast take effect at one point of the stream, in every subtask."""

from __future__ import annotations

import datetime as dt
import os
import signal
from collections import defaultdict

from cairn import Job, KeyedProcess, sinks, state
from cairn.snapshots import EpochReader
from cairn.storage.store import open_store
from tests.spark.support import T0, epochs, finish

EPOCHS = 4
KEYS = 60


class Rules(KeyedProcess):
    """Says which rules it sees. In the middle of an epoch its process dies, once."""

    rules = state.Broadcast("string", "bigint")
    seen = state.Value("bigint", default=0)

    def __init__(self, flag):
        self.flag = flag

    def process(self, row, ctx):
        if row.dies and ctx.key == 7:
            try:
                os.unlink(self.flag)
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        self.seen.set(self.seen.get() + 1)
        rules = ",".join(f"{name}={value}" for name, value in ctx.broadcast.items())
        return row.epoch, ctx.key, ctx.subtask, rules, self.seen.get()

    def process_broadcast(self, row, ctx):
        if row.value is None:
            del self.rules[row.name]
        else:
            # What comes of it depends on what came before.
            self.rules[row.name] = self.rules.get(row.name, 0) * 10 + row.value


CHANGES = [
    [("a", 1), ("a", 2)],
    [("b", 3)],
    [("a", 4), ("b", None), ("c", 5)],
    [("c", None)],
]
EXPECTED = ["a=12", "a=12,b=3", "a=124,c=5", "a=124"]


def test_rules_change_at_the_same_point_in_five_subtasks_one_of_which_dies(
    spark, make_input, tmp_path
):
    flag = tmp_path / "flag"
    flag.touch()
    events = make_input("epoch bigint, k bigint, dies boolean")
    events.add_all([[(e, k, e == 2) for k in range(KEYS)] for e in range(EPOCHS)])
    rules = make_input("at timestamp, name string, value bigint")
    for each in CHANGES:
        timed = [(T0 + dt.timedelta(seconds=n), *change) for n, change in enumerate(each)]
        rules.add(*reversed(timed))
    job = Job("rules", max_parallelism=16)
    changes = job.source("rules", rules.stream(spark), event_time="at")
    out = sinks.Collect()
    job.source("events", events.stream(spark)).key_by("k").broadcast(changes, Rules.rules).process(
        Rules(str(flag)),
        schema="epoch bigint, k bigint, subtask int, rules string, seen bigint",
        uid="rules-of-keys",
    ).sink_to(out, uid="out")
    checkpoint = tmp_path / "checkpoint"
    run = finish(job, checkpoint, parallelism=5)
    assert not flag.exists() and run.status == "finished", "one slot has died"
    committed = epochs(checkpoint)
    assert max(epoch.timings.attempts for epoch in committed) > 1
    assert len(out.rows) == EPOCHS * KEYS
    seen = defaultdict(set)
    subtasks = defaultdict(set)
    for epoch, _, subtask, text, _ in out.rows:
        seen[epoch].add(text)
        subtasks[epoch].add(subtask)
    assert dict(seen) == {epoch: {text} for epoch, text in enumerate(EXPECTED)}
    assert set(map(frozenset, subtasks.values())) == {frozenset(range(5))}
    assert all(count == epoch + 1 for epoch, *_, count in out.rows)
    # Stored once, and found under the operator's name.
    for epoch in committed:
        (part,) = epoch.operators["rules-of-keys:broadcast"].ranges
        assert len([ref for ref in part.files if ref.first_epoch == epoch.number]) <= 1
    with EpochReader(open_store(str(checkpoint)), committed[-1]) as reader:
        rows = [row for batch in reader.rows("rules-of-keys", "rules") for row in batch.to_pylist()]
    assert [(row["key"], row["value"]) for row in rows] == [("a", 124)]
    counted = committed[-1].metrics.operators["rules-of-keys"]
    assert counted.rows_in == KEYS + 1, "a broadcast row counts once"
