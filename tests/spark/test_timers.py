"""Timers in a real job: they outlive savepoints, rollbacks and slots, and need no rows."""

from __future__ import annotations

import datetime as dt
import os
import signal
import time
from collections import Counter

import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.snapshots import write_savepoint
from cairn.snapshots.rollback import rollback
from cairn.storage.store import open_store
from tests.marks import for_soak
from tests.spark.support import (
    T0,
    Input,
    epochs,
    eventually,
    finish,
    published,
    slot_pids,
    stored_state,
)

SCHEMA = "k long, at timestamp, due_s long"
OUT = "k long, kind string, due_s long, n long"
KEYS = range(40)
ALL = Counter({(k, "event", 60 + k % 3, 1): 1 for k in KEYS})


class Remind(KeyedProcess):
    """Tells so many seconds after T0, in event time."""

    n = state.Value("long", default=0)

    def process(self, row, ctx):
        if row.due_s is not None:
            self.n.set(self.n.get() + 1)
            ctx.timers.event(T0 + dt.timedelta(seconds=row.due_s))

    def on_timer(self, time_ms, ctx):
        n = self.n.get()
        self.n.clear()
        return ctx.key, ctx.timer_kind, time_ms // 1000 - round(T0.timestamp()), n


class Soon(KeyedProcess):
    """Tells half a second later, by the clock; without a row."""

    def process(self, row, ctx):
        ctx.timers.processing(after="500 ms")

    def on_timer(self, time_ms, ctx):
        return ctx.key, ctx.timer_kind, None, None


def row(k, at_s, due_s=None):
    return k, T0 + dt.timedelta(seconds=at_s), due_s


def setters():
    """Rows that set a timer per key, about a minute ahead."""
    return [row(k, 0, 60 + k % 3) for k in KEYS]


def make_job(spark, folder, function=None):
    """(input, job); the output goes to folder/out."""
    source = Input(folder / "in", SCHEMA)
    job = Job("remind", max_parallelism=16)
    rows = job.source("rows", source.stream(spark), event_time="at", watermark="0 seconds")
    told = rows.key_by("k").process(function or Remind(), schema=OUT, uid="remind")
    told.sink_to(sinks.Files(str(folder / "out")), uid="out")
    return source, job


def told(folder):
    return Counter((r["k"], r["kind"], r["due_s"], r["n"]) for r in published(folder / "out"))


def timers(job, checkpoint):
    return stored_state(job, checkpoint)["remind"]["timers.event"]


@pytest.mark.parametrize("backend", [for_soak("heap"), "rocksdb"])
def test_a_timer_set_before_a_savepoint_fires_after_restore_at_another_parallelism(
    spark, tmp_path, backend
):
    source, job = make_job(spark, tmp_path)
    source.add(*setters())
    finish(job, tmp_path / "one", parallelism=2, backend=backend)
    assert not told(tmp_path)
    assert set(timers(job, tmp_path / "one")) == set(KEYS)
    write_savepoint(open_store(str(tmp_path / "one")), None, str(tmp_path / "saved"))
    source.add(row(1000, 61))
    finish(job, tmp_path / "two", parallelism=3, backend=backend, savepoint=str(tmp_path / "saved"))
    assert told(tmp_path) == Counter({t: 1 for t in ALL if t[2] <= 61})
    source.add(row(1000, 90))
    finish(job, tmp_path / "two", parallelism=1, backend=backend)
    assert told(tmp_path) == ALL
    assert not timers(job, tmp_path / "two")


def test_a_timer_that_has_fired_fires_again_after_a_rollback(spark, tmp_path):
    source, job = make_job(spark, tmp_path)
    source.add(*setters())
    finish(job, tmp_path / "ckpt")
    back = epochs(tmp_path / "ckpt")[-1].number
    source.add(row(1000, 90))
    finish(job, tmp_path / "ckpt")
    assert told(tmp_path) == ALL
    rollback(open_store(str(tmp_path / "ckpt")), back)
    assert set(timers(job, tmp_path / "ckpt")) == set(KEYS)
    finish(job, tmp_path / "ckpt", parallelism=3)
    assert told(tmp_path) == ALL + ALL


def test_timers_outlive_a_slot_that_is_killed_and_a_rescale(spark, tmp_path):
    source, job = make_job(spark, tmp_path)
    with job.start(
        checkpoint=str(tmp_path / "ckpt"), parallelism=2, trigger="50 milliseconds"
    ) as run:
        source.add(*setters())
        run.process_all_available()
        for pid in slot_pids(run._engine.coordinator.run_id).values():
            os.kill(pid, signal.SIGKILL)
        run.rescale(3)
        source.add(row(1000, 61))
        run.process_all_available()
        assert told(tmp_path) == Counter({t: 1 for t in ALL if t[2] <= 61})
        os.kill(slot_pids(run._engine.coordinator.run_id)[0], signal.SIGKILL)
        source.add(row(1000, 90))
        run.process_all_available()
    assert told(tmp_path) == ALL


def test_a_silent_source_still_fires_processing_timers(spark, tmp_path):
    source, job = make_job(spark, tmp_path, Soon())
    with job.start(
        checkpoint=str(tmp_path / "ckpt"), parallelism=2, trigger="200 milliseconds"
    ) as run:
        source.add(*setters())
        run.process_all_available()
        assert eventually(lambda: len(told(tmp_path)) == len(KEYS))
        last = epochs(tmp_path / "ckpt")[-1]
        # Nothing is left to wait for: no more epochs, however long the source is silent.
        time.sleep(1)
        assert epochs(tmp_path / "ckpt")[-1].number == last.number
    assert told(tmp_path) == Counter({(k, "processing", None, None): 1 for k in KEYS})


def test_a_drain_fires_what_the_watermark_never_came_to(spark, tmp_path):
    source, job = make_job(spark, tmp_path)
    source.add(*setters())
    finish(job, tmp_path / "ckpt", drain=True)
    assert told(tmp_path) == ALL
    assert not timers(job, tmp_path / "ckpt")


def test_an_error_in_on_timer_comes_to_the_driver(spark, tmp_path):
    class Failing(Remind):
        def on_timer(self, time_ms, ctx):
            raise RuntimeError("no such thing")

    source, job = make_job(spark, tmp_path, Failing())
    source.add(*setters()).add(row(1000, 60))
    with pytest.raises(Exception, match="no such thing") as raised:
        finish(job, tmp_path / "ckpt")
    assert "timer: event at 2026-01-01T00:01:00+00:00" in str(raised.value)
    assert "on_timer() of operator 'remind'" in str(raised.value)
