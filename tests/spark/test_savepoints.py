"""Savepoints of a real job: any backend, any parallelism, any folder; and checkpoints that go.

A savepoint is compared with a run that nobody touched: what a job started from it
publishes and keeps is what that run published and kept from the same file on.
"""

from __future__ import annotations

import functools
import itertools
import operator
import shutil
from pathlib import Path

import pytest

from cairn import (
    EpochError,
    FunctionError,
    Job,
    KeyedProcess,
    PlanError,
    RestoreError,
    StateSchemaError,
    sinks,
    state,
)
from cairn.cli import main
from cairn.driver.coordinator import compaction
from cairn.driver.coordinator.epoch import Coordinator
from cairn.key_groups import groups_of
from cairn.snapshots import open_savepoint
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.memory import memory_folder
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from tests.backends import MORE_IN_SOAK, SERVERS, backend_name
from tests.marks import for_soak
from tests.spark.live import Live
from tests.spark.programs.ledger import SCHEMA, build, payments
from tests.spark.support import (
    Input,
    Program,
    by_id,
    epochs,
    finish,
    published,
    stored_state,
)

GROUPS = 16
EVERYWHERE = ("heap", "rocksdb", *SERVERS)


class Saved:
    """A savepoint taken from a running job, which went on for one more file."""

    def __init__(self, spark, folder, files, backend):
        self.path = folder / "savepoint"
        with Live(spark, folder, files, backend=backend) as live:
            live.feed(2)
            # A base is written in the background: until it is there, its format is not saved.
            while not has_base(epochs(live.checkpoint)[-1]):
                live.feed()
            self.files = live.source.count
            self.info = live.run.savepoint(str(self.path))
            self.epoch = epochs(live.checkpoint)[-1]
            live.feed()
        self.live = live


def has_base(epoch):
    files = [f for part in epoch.operators["ledger"].ranges for f in part.files]
    return any(file.kind == "base" for file in files)


@pytest.fixture(scope="module")
def saved(spark, ledger, tmp_path_factory):
    """saved(backend) -> a savepoint"""

    @functools.cache
    def take(backend):
        folder = tmp_path_factory.mktemp(backend)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compaction, "BASE_BYTES_MIN", 1)
            return Saved(spark, folder, ledger.files, backend_name(backend))

    return take


def input_of(folder, ledger, files):
    return Input(folder / "in", SCHEMA).add_all(ledger.files[:files])


# From anything to anything


@pytest.mark.parametrize(
    ("before", "after", "parallelism"),
    [
        ("rocksdb", "heap", 3),
        *(
            for_soak(before, after, 1 + number % 3)
            for number, (before, after) in enumerate(itertools.product(EVERYWHERE, repeat=2))
            if (before, after) != ("rocksdb", "heap")
        ),
    ],
)
def test_a_savepoint_restores_every_value_into_any_backend_at_any_parallelism(
    spark, ledger, saved, tmp_path, before, after, parallelism
):
    savepoint = saved(before)
    # The input it was taken of: the file source knows by their names which files it has read.
    source = savepoint.live.source
    count = savepoint.files
    job = build(spark, source.folder, tmp_path)
    finish(
        job,
        tmp_path / "checkpoint",
        parallelism,
        savepoint=savepoint.path,
        backend=backend_name(after),
    )
    loaded, *_, newest = epochs(tmp_path / "checkpoint")
    assert loaded.parent is None and newest.parent == loaded.number
    for entry in (*loaded.operators.values(), *newest.operators.values()):
        owned = [range(p.first_group, p.first_group + p.group_count) for p in entry.ranges]
        assert owned == [groups_of(i, parallelism, GROUPS) for i in range(parallelism)]
    held = sum(p.state_entries for entry in loaded.operators.values() for p in entry.ranges)
    assert held == savepoint.info.rows
    assert stored_state(job, tmp_path / "checkpoint", loaded.number) == ledger.state(count)
    assert stored_state(job, tmp_path / "checkpoint") == ledger.state(count + 1)
    assert by_id(published(tmp_path / "booked")) == ledger.booked(count, count + 1)


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
def test_a_job_goes_on_while_a_savepoint_of_it_is_taken(spark, ledger, saved, backend):
    savepoint = saved(backend)
    assert savepoint.info.epoch == savepoint.epoch.number
    formats = {f.format for p in savepoint.epoch.operators["ledger"].ranges for f in p.files}
    assert (backend in formats) == (backend in ("rocksdb", "postgres")), formats
    live = savepoint.live
    assert live.booked() == ledger.booked(0, savepoint.files + 1)
    assert live.state() == ledger.state(savepoint.files + 1)
    assert not list((live.checkpoint / "holds").glob("*")), "its hold is released"


def test_anything_reads_a_savepoint_as_parquet(spark, ledger, saved):
    expected = ledger.state(saved("heap").files)["ledger"]
    folder = saved("heap").path / "state" / "ledger"
    counts = spark.read.parquet(str(folder / "count"))
    assert counts.schema.simpleString() == "struct<key_group:int,key:string,value:bigint>"
    rows = counts.collect()
    assert {row.key: row.value for row in rows} == expected["count"]
    assert {row.key_group for row in rows} == set(range(GROUPS)), "keys in every group"
    entries = spark.read.parquet(str(folder / "by_size"))
    found = {(row.key, row.entry): row.value for row in entries.collect()}
    sizes = expected["by_size"].items()
    assert found == {(key, size): n for key, held in sizes for size, n in held.items()}
    lists = spark.read.parquet(str(folder / "last"))
    assert {row.key: row.value for row in lists.collect()} == expected["last"]


# Stop, start, start again


def test_a_stopped_job_goes_on_elsewhere_from_its_savepoint_and_loads_it_once(
    spark, ledger, tmp_path
):
    old, new, path = tmp_path / "old", tmp_path / "new", tmp_path / "savepoint"
    with Live(spark, old, ledger.files) as live:
        with pytest.raises(EpochError, match="no committed epoch yet"):
            live.run.savepoint(str(path))
        newest = live.feed()
        live.run.stop(savepoint=str(path))
        assert live.run.status == "stopped"
    assert open_savepoint(str(path)).info.epoch == newest.number

    # Somebody puts it in its place before it is used.
    moved = tmp_path / "moved" / "savepoint"
    moved.parent.mkdir()
    shutil.move(path, moved)
    job = build(spark, live.source.folder, new)
    for count in (2, 3):
        live.source.add(*ledger.files[count - 1])
        finish(job, new / "checkpoint", savepoint=moved)
        assert by_id(published(new / "booked")) == ledger.booked(1, count)
        assert stored_state(job, new / "checkpoint") == ledger.state(count)
    assert [e.parent for e in epochs(new / "checkpoint")].count(None) == 1, "it was loaded once"

    with pytest.raises(RestoreError, match="this checkpoint has epochs of its own"):
        finish(live.job, live.checkpoint, savepoint=moved)
    finish(live.job, live.checkpoint)
    assert live.booked() == ledger.booked(0, 3), "the old one is as it was, and can go on too"


def test_stop_with_a_savepoint_of_a_checkpoint_that_is_deleted_is_refused_and_the_run_goes_on(
    spark, ledger, tmp_path
):
    with Live(spark, tmp_path, ledger.files, on_stop="delete") as live:
        live.feed()
        with pytest.raises(PlanError, match=r"take run.savepoint\(path\) first"):
            live.run.stop(savepoint=str(tmp_path / "savepoint"))
        live.feed()
        live.run.savepoint(str(tmp_path / "savepoint"))
    assert not live.checkpoint.exists()
    assert verify_savepoint(tmp_path / "savepoint") == []


def verify_savepoint(path):
    return [str(damage) for damage in open_savepoint(str(path)).verify()]


# Another program


class Sum(KeyedProcess):
    """The state that the tests below change the form of."""

    total = state.Value("int", default=0)
    about = state.Value("struct<n:int>")

    def process(self, row, ctx):
        self.total.set(self.total.get() + row.v)
        about = self.about.get()
        self.about.set((1 if about is None else about.n + 1,))
        yield row.k, self.total.get()


ROWS = "k bigint, v int"
OUT = "k bigint, total bigint"


def sums(spark, work, rows, function=None, uid="sum", more=None, then=None):
    job = Job("sums", max_parallelism=8)
    stream = job.source("rows", rows.stream(spark))
    if more is not None:
        stream = stream.union(job.source("more", more.stream(spark)))
    if uid is not None:
        totals = stream.key_by("k").process(function or Sum(), schema=OUT, uid=uid)
        totals.sink_to(sinks.Files(str(work / "out")), uid="out")
    if then is not None:
        stream.key_by("k").process(then, schema=OUT, uid="then")
    return job


class Small:
    """A savepoint of `sums`, after one file. Spark keeps its own log elsewhere."""

    def __init__(self, spark, folder):
        self.path, self.checkpoint = folder / "savepoint", folder / "checkpoint"
        self.rows = Input(folder / "in", ROWS).add((1, 10), (2, 20), (1, 30))
        job = sums(spark, folder, self.rows)
        finish(job, self.checkpoint, spark_checkpoint=folder / "spark")
        options = ("--spark-checkpoint", folder / "spark")
        assert cairn("savepoint", self.checkpoint, self.path, *options) == 0
        self.rows.add((1, 1), (3, 3))


def cairn(*arguments):
    """A command as it is typed; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


@pytest.fixture(scope="module")
def small(spark, tmp_path_factory):
    return Small(spark, tmp_path_factory.mktemp("small"))


def totals(work):
    return sorted((row["k"], row["total"]) for row in published(work / "out"))


class Wider(KeyedProcess):
    """A number is wider, a struct has a field more."""

    total = state.Value("bigint", default=0)
    about = state.Value("struct<n:bigint, note:string>")

    def process(self, row, ctx):
        self.total.set(self.total.get() + row.v + (1 << 40))
        about = self.about.get()
        self.about.set((1, "new") if about is None else (about.n + 1, about.note))
        yield row.k, self.total.get()


def test_state_changes_its_form_on_the_way_through_a_savepoint(spark, small, tmp_path):
    job = sums(spark, tmp_path, small.rows, Wider())
    finish(job, tmp_path / "checkpoint", savepoint=small.path)
    assert totals(tmp_path) == [(1, 41 + (1 << 40)), (3, 3 + (1 << 40))]
    kept = stored_state(job, tmp_path / "checkpoint")["sum"]
    assert kept["total"] == {1: 41 + (1 << 40), 2: 20, 3: 3 + (1 << 40)}
    assert kept["about"] == {1: (3, None), 2: (1, None), 3: (1, "new")}


def test_a_form_that_cannot_be_made_is_refused_and_the_right_program_starts_after_it(
    spark, small, tmp_path
):
    class Text(KeyedProcess):
        total = state.Value("string")
        about = state.Value("struct<n:int>")

        def process(self, row, ctx): ...

    class Migrated(KeyedProcess):
        total = state.Value("string", migrate=lambda total: f"{total} in all")
        about = state.Value("struct<n:int>")

        def process(self, row, ctx): ...

    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(StateSchemaError, match="migrate=") as refused:
        finish(sums(spark, tmp_path, small.rows, Text()), checkpoint, savepoint=small.path)
    assert (refused.value.operator, refused.value.state) == ("sum", "total")
    assert Log(open_store(str(checkpoint))).newest_epoch() is None, "nothing is published"
    job = sums(spark, tmp_path, small.rows, Migrated())
    finish(job, checkpoint, savepoint=small.path)
    kept = stored_state(sums(spark, tmp_path, small.rows, Text()), checkpoint)["sum"]
    assert kept["total"] == {1: "40 in all", 2: "20 in all"}


def test_a_savepoint_has_the_list_of_files_also_without_spark_s_folder(small, tmp_path):
    assert cairn("savepoint", small.checkpoint, tmp_path / "savepoint") == 0
    saved, expected = open_savepoint(str(tmp_path / "savepoint")), open_savepoint(str(small.path))
    assert saved.source_files() == expected.source_files() != {}


class Seen(KeyedProcess):
    seen = state.Reducing("bigint", operator.add)

    def process(self, row, ctx):
        self.seen.add(1)


def test_an_operator_is_added_or_given_up_on_the_way_through_a_savepoint(spark, small, tmp_path):
    added, gone = tmp_path / "added", tmp_path / "gone"
    job = sums(spark, added, small.rows, then=Seen())
    finish(job, added / "checkpoint", savepoint=small.path)
    kept = stored_state(job, added / "checkpoint")
    assert kept["then"]["seen"] == {1: 1, 3: 1}, "it starts empty, where the other one stood"
    assert kept["sum"]["total"] == {1: 41, 2: 20, 3: 3}

    job = sums(spark, gone, small.rows, uid=None, then=Seen())
    with pytest.raises(PlanError, match=r"operator 'sum'.*\n.*allow_dropped_state=True"):
        finish(job, gone / "checkpoint", savepoint=small.path)
    finish(job, gone / "checkpoint", savepoint=small.path, allow_dropped_state=True)
    assert stored_state(job, gone / "checkpoint") == {"then": {"seen": {1: 1, 3: 1}}}


def test_a_source_is_added_on_the_way_through_a_savepoint(spark, small, make_input, tmp_path):
    more = make_input(ROWS).add((1, 100), (4, 4))
    job = sums(spark, tmp_path, small.rows, more=more)
    finish(job, tmp_path / "checkpoint", savepoint=small.path)
    kept = stored_state(job, tmp_path / "checkpoint")["sum"]
    assert kept["total"] == {1: 141, 2: 20, 3: 3, 4: 4}, "each row once"
    assert epochs(tmp_path / "checkpoint")[-1].spark.sources == ["rows", "more"]


# Checkpoints that go, epochs that stay


def test_a_checkpoint_in_memory_runs_and_leaves_nothing_behind(spark, tmp_path):
    source = Input(tmp_path / "in", SCHEMA).add_all(payments(2))
    arguments = (source.folder, tmp_path, "--checkpoint", "memory:")
    with Program("ledger", *arguments, on=spark) as program:
        next(program.reports())
        # Folders in memory lie beside each other, named for the process they are of.
        beside = Path(memory_folder()).parents[1]
        pattern = f"cairn-memory-*-{program.process.pid}-*"
        assert list(beside.glob(pattern)), "that is where they lie"
        program.await_report(end="finished")
        program.end()
    assert len(published(tmp_path / "booked")) == 60
    assert not list(beside.glob(pattern))


class Fails(Sum):
    def process(self, row, ctx):
        raise ValueError("no such luck")


def test_a_checkpoint_to_be_deleted_goes_after_success_and_stays_after_a_failure(
    spark, small, tmp_path, monkeypatch
):
    defaults = {**Coordinator.__init__.__kwdefaults__, "attempts_max": 1}
    monkeypatch.setattr(Coordinator.__init__, "__kwdefaults__", defaults)
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(FunctionError, match="no such luck"):
        finish(sums(spark, tmp_path, small.rows, Fails()), checkpoint, on_stop="delete")
    assert (checkpoint / "job.json").exists(), "whoever looks for the reason needs it"

    job = sums(spark, tmp_path, small.rows)
    finish(job, checkpoint, on_stop="delete")
    assert not checkpoint.exists()
    assert totals(tmp_path) == [(1, 10), (1, 40), (1, 41), (2, 20), (3, 3)]

    elsewhere = tmp_path / "spark"
    with job.start(
        checkpoint=str(checkpoint), on_stop="delete", spark_checkpoint=elsewhere, parallelism=2
    ) as run:
        run.process_all_available()
        assert checkpoint.exists() and files_in(elsewhere)
    assert run.status == "stopped" and not checkpoint.exists() and not files_in(elsewhere)


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("retained_for", [None, "1 hour"])
def test_young_epochs_are_kept_beyond_their_number(spark, ledger, tmp_path, retained_for):
    checkpoint = tmp_path / "checkpoint"
    # Epochs go in runs of numbers that share a full manifest; a few takeovers bring us to its end.
    store = open_store(str(checkpoint))
    create_or_open_job(store, "ledger", GROUPS)
    for _ in range(16):
        Log(store).take_over(host="nobody", pid=0, wall_ms=0)
    source = input_of(tmp_path, ledger, 5)
    job = build(spark, source.folder, tmp_path)
    finish(job, checkpoint, retained_epochs=1, retained_for=retained_for)
    kept = [epoch.number for epoch in epochs(checkpoint)]
    assert kept == ([18, 19, 20, 21, 22] if retained_for else [20, 21, 22])
    report = verify(store)
    assert report.ok and not report.orphans, report
