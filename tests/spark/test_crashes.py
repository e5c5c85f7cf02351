"""Whatever dies, and whenever: each row is published once, and state is as if nothing had happened.

Every test compares with the same job on the same input, undisturbed. Payments count
through (`id`), a file is an epoch: what is published at any moment is a prefix of whole
files, without a gap and without a double.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import shutil
import time

import pytest

from cairn import (
    CommitConflictError,
    CommitError,
    CorruptFileError,
    EpochError,
    FunctionError,
)
from cairn.crash import POINTS
from cairn.driver.coordinator import compaction
from cairn.driver.coordinator.rewind import Stand
from cairn.snapshots.saving import write_savepoint
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, Takeover
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from cairn.testing.crash import crash_points
from cairn.testing.faulty_store import Fault, FaultyStore
from tests.backends import SERVERS, backend_name
from tests.marks import for_soak
from tests.soak.schedule import DRIVER_POINTS, SINK_POINTS
from tests.spark.programs.ledger import SCHEMA, Ledger, build, payments
from tests.spark.support import Input, Program, by_id, epochs, finish, published, stored_state

ROWS = 30
SINKS = ("booked", "large", "spread")


class Undisturbed:
    """What the job must come to on its first so many files."""

    def __init__(self, spark, folder, files):
        self.input = Input(folder / "in", SCHEMA).add_all(payments(files, ROWS))
        self.files = files
        self.job = build(spark, self.input.folder, folder)
        self.checkpoint = folder / "checkpoint"
        finish(self.job, self.checkpoint, retained_epochs=files)
        self.rows = {sink: by_id(published(folder / sink)) for sink in SINKS}
        self.state = stored_state(self.job, self.checkpoint)

    def check(self, work, checkpoint=None):
        """Nothing lost, nothing doubled, the state the same, the checkpoint whole."""
        assert self.check_prefix(work) == self.files
        for sink in SINKS:
            assert len(published(work / sink)) == len(self.rows[sink]), sink
        self.check_state(checkpoint or work / "checkpoint")

    def check_state(self, checkpoint):
        assert stored_state(self.job, checkpoint) == self.state
        report = verify(open_store(str(checkpoint)))
        assert report.ok, report.damage

    def check_prefix(self, work):
        """Whole files from the first on; returns how many are published."""
        found = {sink: by_id(published(work / sink)) for sink in SINKS}
        for sink in ("booked", "large"):
            assert found[sink] == self.rows[sink][: len(found[sink])], sink
        # The second operator may see the rows of an epoch in another order.
        spread = found["spread"]
        assert [row["id"] for row in spread] == list(range(len(spread)))
        for size in {row["size"] for row in spread}:
            seen = sorted(row["seen"] for row in spread if row["size"] == size)
            assert seen == list(range(1, len(seen) + 1)), f"size {size}"
        for sink in ("booked", "spread"):
            assert len(found[sink]) % ROWS == 0, sink
        return len(found["booked"]) // ROWS


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory):
    return Undisturbed(spark, tmp_path_factory.mktemp("undisturbed"), 16)


@pytest.fixture(scope="module")
def short(spark, tmp_path_factory):
    return Undisturbed(spark, tmp_path_factory.mktemp("short"), 4)


# The driver


def crash_chain(spark, undisturbed, work, points, *always):
    """Start, die at a point, start again, die at the next, ….

    A point is a name, at which pass of it to die, and what to start the program with.
    """
    done = 0
    for number, (point, nth, *arguments) in enumerate(points):
        arguments = ("--retained", 1, "--parallelism", 1 + number % 3, *always, *arguments)
        arguments = (undisturbed.input.folder, work, *arguments)
        with Program("ledger", *arguments, on=spark, CAIRN_CRASH_AT=f"{point}:{nth}") as program:
            program.end()
        assert program.killed, f"not killed at {point}: {program.errors[-2000:]}"
        now = undisturbed.check_prefix(work)
        assert now >= done, f"fewer rows after {point}"
        done = now
    assert done < undisturbed.files, "more files, so that the last one dies in the middle"


def crash_chains(spark, undisturbed, *chains, **options):
    """Several chains at the same time: each a folder, its points, and what to start with.

    Then a driver that nobody kills, the one of these tests, runs each to the end.
    """
    with concurrent.futures.ThreadPoolExecutor(len(chains)) as pool:
        for run in [pool.submit(crash_chain, spark, undisturbed, *chain) for chain in chains]:
            run.result()
    for work, *_ in chains:
        job = build(spark, undisturbed.input.folder, work)
        finish(job, work / "checkpoint", retained_epochs=1, **options)
        undisturbed.check(work)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "begins",
    [["with nothing"], for_soak(["with nothing", "from a savepoint"])],
    ids=["one chain", "two chains"],
)
def test_driver_killed_at_its_start_or_in_an_epoch_loses_and_doubles_nothing(
    spark, undisturbed, tmp_path, begins
):
    """Chains of drivers at the same time, each of which dies at the points in turn.

    The second one starts from a savepoint, with the output that there was by then.
    Points between the last subtask and the end of the epoch are in test_sink_kills.
    """
    arguments = {
        # Once per start.
        "driver.takeover.written": (1,),
        "driver.savepoint.loaded": (1,),
        "driver.rewind.laid": (1,),
        "driver.recovered": (1,),
        "driver.deployed": (1, "--change", "1:rescale=4"),
    }
    # Epochs without a batch have a test of their own, with timers; rounds one with a loop;
    # batches that are published before their epoch one with weaker guarantees.
    apart = ("driver.idle.", "driver.round.", "driver.batch.")
    named = [p for p in POINTS if p.startswith("driver.") and not p.startswith(apart)]
    named = [p for p in named if p not in (*DRIVER_POINTS, *SINK_POINTS)]
    points = [(p, *arguments.get(p, (2,))) for p in named]
    at_start, in_epoch = points[:4], points[4:]
    assert {p for p, *_ in at_start} <= arguments.keys(), "those of a start are first in POINTS"
    # Each one more costs the second chain up to two files of `undisturbed`.
    assert len(in_epoch) == 3, f"found {in_epoch}: are there enough files for one more?"
    takeover, savepoint, rewind, recovered = at_start
    a, b = tmp_path / "a", tmp_path / "b"
    saved = epochs(undisturbed.checkpoint)[1]
    write_savepoint(open_store(str(undisturbed.checkpoint)), saved.number, str(tmp_path / "saved"))
    for sink in SINKS:
        (b / sink).mkdir(parents=True)
        for file in (undisturbed.checkpoint.parent / sink).glob("part-*"):
            if int(file.name.split("-")[1]) <= saved.number:
                shutil.copy(file, b / sink)
    # The points of a start come last, where there can be epochs to come back to.
    chains = [
        (a, [*in_epoch[:1], takeover, rewind, recovered]),
        (b, [savepoint, *in_epoch[1:]], "--savepoint", tmp_path / "saved"),
    ]
    crash_chains(spark, undisturbed, *chains[: len(begins)])
    for work in (a, b)[: len(begins)]:
        assert spark.read.parquet(str(work / "booked")).count() == undisturbed.files * ROWS
        # With one epoch retained, old records and files have been collected on the way.
        assert not (work / "checkpoint" / "epochs" / "000000000001.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
# test_demo.py kills a driver with its JVM.
@pytest.mark.parametrize("with_jvm", [[False], for_soak([False, True])], ids=["attached", "both"])
def test_driver_killed_at_any_moment_loses_and_doubles_nothing(spark, short, tmp_path, with_jvm):
    """With its JVM or without it, wherever it happens to be. The seed is in the test."""
    chance = random.Random(11)
    for on in (None if own else spark for own in with_jvm):
        trap = "sleep * 0.01"
        with Program("ledger", short.input.folder, tmp_path, on=on, TRAP=trap) as program:
            program.await_report()
            time.sleep(chance.uniform(0, 3))
            program.kill()
        short.check_prefix(tmp_path)
    finish(build(spark, short.input.folder, tmp_path), tmp_path / "checkpoint")
    short.check(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_newer_driver_wins_and_the_older_one_publishes_nothing_more(spark, short, tmp_path):
    folder = short.input.folder
    keep = ("--retained", 100)
    # An epoch takes seconds: it is in one of the last when the newer one takes over.
    with Program("ledger", folder, tmp_path, *keep, on=spark, TRAP="sleep * 0.2") as older:
        older.await_report(epoch=3)
        finish(build(spark, folder, tmp_path), tmp_path / "checkpoint", retained_epochs=100)
        ends = older.end()[-1]
    assert (ends["end"], ends["error"]) == ("superseded", CommitConflictError.__name__)
    assert "another driver" in ends["text"]
    short.check(tmp_path)
    log = Log(open_store(str(tmp_path / "checkpoint")))
    records = list(log.records())
    (takeover,) = (record for record in records if isinstance(record, Takeover))
    terms = [record.term for record in records if isinstance(record, Epoch)]
    assert set(terms) == {1, takeover.number} and terms == sorted(terms)
    assert {r.term for r in records if r.number < takeover.number} == {1}


# Slots


class Armed(Ledger):
    """Its slot dies at a crash point, once per subtask."""

    def __init__(self, point, nth, once):
        self.point, self.nth, self.once = point, nth, str(once)

    def open(self, ctx):
        os.environ["CAIRN_CRASH_AT"] = f"{self.point}:{self.nth}"
        os.environ["CAIRN_CRASH_ONCE"] = f"{self.once}-{ctx.subtask}"


BESIDE = (
    "slot.restored",
    "slot.base.begun",
    "slot.base.written",
    "slot.rows.applied",
    "slot.sst.uploaded",
)
"""Not passed in every epoch: test_crashes_live has them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "point"),
    [
        # The simulation has every point in every `make test`.
        ("heap", "slot.batch"),
        for_soak("heap", "slot.delta.written"),
        *(
            (pytest.param if point in ("slot.delta.written", "slot.sink.prepared") else for_soak)(
                "rocksdb", point
            )
            for point in sorted(set(crash_points("slot")) - set(BESIDE))
        ),
        *(
            for_soak(backend, point)
            for backend in SERVERS
            for point in sorted(set(crash_points("slot")) - set(BESIDE))
        ),
    ],
)
def test_slots_killed_at_every_point_are_replaced_and_change_nothing(
    spark, short, tmp_path, point, backend
):
    """In the second epoch: at its first level for one half of the points, its second for all."""
    function = Armed(point, 3 if point != "slot.begun" else 4, tmp_path / "once")
    job = build(spark, short.input.folder, tmp_path, function)
    run = finish(job, tmp_path / "checkpoint", backend=backend_name(backend))
    assert {path.name for path in tmp_path.glob("once-*")} == {"once-0", "once-1"}
    attempts = [epoch.timings.attempts for epoch in epochs(tmp_path / "checkpoint")]
    assert max(attempts) > 1, attempts
    assert run.error is None
    short.check(tmp_path)


class Failing(Ledger):
    """Raises at one row, so many times over all slots."""

    def __init__(self, row_id, times, mark):
        self.row_id, self.times, self.mark = row_id, times, str(mark)

    def process(self, row, ctx):
        if row.id == self.row_id:
            tries = os.path.getsize(self.mark) if os.path.exists(self.mark) else 0
            if tries < self.times:
                with open(self.mark, "a") as file:
                    file.write("x")
                raise RuntimeError(f"try {tries + 1}")
        yield from super().process(row, ctx)


def test_task_that_fails_twice_and_then_succeeds_changes_nothing(spark, short, tmp_path):
    function = Failing(45, 2, tmp_path / "tries")
    finish(build(spark, short.input.folder, tmp_path, function), tmp_path / "checkpoint")
    attempts = [epoch.timings.attempts for epoch in epochs(tmp_path / "checkpoint")]
    assert attempts == [1, 3, 1, 1]
    short.check(tmp_path)


def test_function_that_always_fails_gives_its_first_cause_and_commits_nothing(
    spark, short, tmp_path
):
    function = Failing(45, 99, tmp_path / "tries")
    with pytest.raises(FunctionError, match="RuntimeError: try 1") as raised:
        finish(build(spark, short.input.folder, tmp_path, function), tmp_path / "checkpoint")
    assert (raised.value.attempts, raised.value.epoch) == (4, 3)
    assert os.path.getsize(tmp_path / "tries") == 4
    assert len(epochs(tmp_path / "checkpoint")) == 1
    assert short.check_prefix(tmp_path) == 1
    # With the cause gone it goes on.
    finish(build(spark, short.input.folder, tmp_path), tmp_path / "checkpoint")
    short.check(tmp_path)


# Storage


class DriversStore(FaultyStore):
    """Spark's own files have no checksum of ours, so of those a read is whole or fails."""

    def get(self, path):
        if not path.startswith("spark/"):
            return super().get(path)
        return self._run("get", lambda: self.inner.get(path))


@pytest.fixture
def faulty(monkeypatch):
    """faulty(plan…) -> the driver's store fails as told from the next start on."""
    stores = []

    def wrap(*plan, **random_faults):
        def open_faulty(url):
            stores.append(DriversStore(open_store(url), plan, **random_faults))
            return stores[-1]

        monkeypatch.setattr("cairn.driver.start.open_store", open_faulty)
        return stores

    yield wrap


# Calls of put_if_absent: job.json, the takeover, then one per epoch. Of put: what the job looks
# like, then a pack per epoch.
@pytest.mark.parametrize(
    "fault",
    [
        for_soak(Fault("put", 3, "before")),
        for_soak(Fault("put", 3, "after")),
        for_soak(Fault("put", 3, "enospc")),
        for_soak(Fault("put_if_absent", 4, "before")),
        Fault("put_if_absent", 4, "after"),
    ],
    ids=lambda fault: f"{fault.operation}-{fault.kind}",
)
def test_store_that_fails_once_or_does_not_say_is_asked_again(
    spark, short, tmp_path, faulty, fault
):
    stores = faulty(fault)
    finish(build(spark, short.input.folder, tmp_path), tmp_path / "checkpoint")
    assert stores[0].faults_seen == [fault]
    short.check(tmp_path)


@pytest.mark.parametrize("operation", [for_soak("put"), "put_if_absent"])
def test_full_disk_fails_the_run_cleanly_and_the_next_one_goes_on(
    spark, short, tmp_path, faulty, operation
):
    first = {"put": 4, "put_if_absent": 7}[operation]
    faulty(*(Fault(operation, call, "enospc") for call in range(first, first + 99)))
    job = build(spark, short.input.folder, tmp_path)
    run = job.start(checkpoint=str(tmp_path / "checkpoint"), trigger="available-now")
    with pytest.raises((EpochError, CommitError), match="injected at put"):
        run.wait(60)
    assert run.status == "failed" and 0 < short.check_prefix(tmp_path) < short.files
    faulty()
    finish(build(spark, short.input.folder, tmp_path), tmp_path / "checkpoint")
    short.check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, for_soak(4)])
def test_store_that_fails_at_random_costs_restarts_and_nothing_else(
    spark, short, tmp_path, faulty, seed
):
    faults = 0
    for attempt in range(30):
        stores = faulty(seed=seed * 1000 + attempt, fault_rate=0.08)
        try:
            finish(build(spark, short.input.folder, tmp_path), tmp_path / "checkpoint")
            break
        except Exception:
            short.check_prefix(tmp_path)
        finally:
            faults += len(stores[-1].faults_seen)
    else:
        pytest.fail("never finished")
    assert faults
    faulty()
    finish(build(spark, short.input.folder, tmp_path), tmp_path / "checkpoint")
    short.check(tmp_path)


class BadDisk(Ledger):
    """Its slot's writes fail, so many times; then its reads, when it restores."""

    def __init__(self, mark, times):
        self.mark, self.times = str(mark), times

    def process(self, row, ctx):
        import cairn.storage.store as stores

        if not hasattr(stores, "broken"):
            stores.broken = True
            put = stores.LocalStore.put_parts

            def failing(store, path, data):
                with open(self.mark, "a") as file:
                    file.write("x")
                if os.path.getsize(self.mark) <= self.times:
                    raise OSError(28, "No space left on device")
                put(store, path, data)

            stores.LocalStore.put_parts = failing
        yield from super().process(row, ctx)


def test_slot_that_cannot_store_its_delta_at_first_is_asked_again(
    spark, short, tmp_path, monkeypatch
):
    monkeypatch.setattr("cairn.driver.coordinator.epoch.INLINE_BYTES_MAX", 0)
    function = BadDisk(tmp_path / "writes", 2)
    finish(build(spark, short.input.folder, tmp_path, function), tmp_path / "checkpoint")
    assert epochs(tmp_path / "checkpoint")[0].timings.attempts > 1
    short.check(tmp_path)


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


# tests/simulation/test_damage.py has every kind of file without Spark.
@pytest.mark.soak
def test_damaged_newest_file_is_named_and_never_skipped(spark, short, tmp_path):
    """A delta, a delta that is gone, a manifest: each is refused by name until it is back."""
    source = Input(tmp_path / "in", SCHEMA).add_all(payments(short.files)[:2])
    at = tmp_path / "checkpoint"
    job = build(spark, source.folder, tmp_path)
    finish(job, at)
    source.add_all(payments(short.files)[2:])
    newest = epochs(at)[-1]
    delta = at / newest.operators["ledger"].ranges[0].files[-1].path
    record = at / "epochs" / f"{newest.number:012d}.json"
    for file, harm in [(delta, damage), (delta, type(delta).unlink), (record, damage)]:
        whole = file.read_bytes()
        harm(file)
        with pytest.raises(CorruptFileError) as raised:
            finish(job, at)
        assert file.name in raised.value.file and file.name in str(raised.value)
        assert short.check_prefix(tmp_path) == 2
        file.write_bytes(whole)
        # Takeovers of the runs that failed are newer; the epoch is still the newest one.
        assert epochs(at)[-1].number == newest.number
    finish(job, at)
    short.check(tmp_path)


# Spark's folder and the log


@pytest.mark.soak  # test_sources has some damage to Spark's folder in every `make test`.
def test_restart_goes_on_from_the_log_wherever_sparks_folder_stands(spark, undisturbed, tmp_path):
    """Every stand in turn, on one checkpoint, before and after the file source's log compacts."""
    files = payments(undisturbed.files)
    source = Input(tmp_path / "in", SCHEMA)
    at = tmp_path / "checkpoint"
    job = build(spark, source.folder, tmp_path)
    fed = 0

    def feed(count):
        nonlocal fed
        source.add_all(files[fed : fed + count])
        fed += count

    def newest_folder():
        position = epochs(at)[-1].spark
        return at / position.folder, position.batch_id

    def forget_commit(folder, batch):
        (folder / "commits" / str(batch)).unlink()
        (folder / "commits" / f".{batch}.crc").unlink(missing_ok=True)

    def run_ahead(folder, batch):
        # As after a log that was put back from a backup: Spark has done a batch more.
        for kind in ("offsets", "commits"):
            known = (folder / kind / str(batch)).read_text()
            moved = known.replace(f'"logOffset":{batch}', f'"logOffset":{batch + 1}')
            (folder / kind / str(batch + 1)).write_text(moved)

    def differ(folder, batch):
        path = folder / "offsets" / str(batch)
        path.write_text(path.read_text().replace('"logOffset":', '"logOffset":9'))
        (folder / "offsets" / f".{batch}.crc").unlink(missing_ok=True)

    def lose(folder, batch):
        for kind in ("offsets", "commits"):
            for path in (folder / kind).iterdir():
                path.unlink()

    feed(3)
    assert finish(job, at)._engine._batches.stand is Stand.FRESH
    for stand, change in [
        (Stand.EQUAL, lambda folder, batch: None),
        (Stand.BEHIND, forget_commit),
        (Stand.AHEAD, run_ahead),
        (Stand.DIFFERENT, differ),
        (Stand.MISSING, lose),
        # By now the list of files read has been compacted.
        (Stand.AHEAD, run_ahead),
        (Stand.BEHIND, forget_commit),
        (Stand.MISSING, lose),
    ]:
        change(*newest_folder())
        feed(2 if fed < 11 else 1)
        run = finish(job, at)
        assert run._engine._batches.stand is stand
        assert undisturbed.check_prefix(tmp_path) == fed, stand
    assert fed <= undisturbed.files
    feed(undisturbed.files - fed)
    finish(job, at)
    undisturbed.check(tmp_path)


def test_lost_folder_of_spark_s_is_laid_out_from_the_newest_epoch(spark, short, tmp_path):
    """Without its list of files every file would look new, and every row be counted again."""
    at = tmp_path / "checkpoint"
    job = build(spark, short.input.folder, tmp_path)
    finish(job, at)
    shutil.rmtree(at / "spark")
    finish(job, at)
    short.check(tmp_path)


# Age


@pytest.mark.soak  # Jobs of the simulation grow old in every `make test`.
@pytest.mark.timeout(600)
def test_job_that_grows_old_merges_rebases_and_collects_without_changing_anything(
    spark, tmp_path, monkeypatch
):
    monkeypatch.setattr(compaction, "BASE_BYTES_MIN", 30_000)
    expected = Undisturbed(spark, tmp_path / "expected", 26)
    monkeypatch.setattr(compaction, "BASE_BYTES_MIN", 12_000)
    work = tmp_path / "work"
    source = Input(work / "in", SCHEMA)
    job = build(spark, source.folder, work)
    for parallelism, stop in ((2, 12), (3, 23), (1, 26)):
        source.add_all(payments(26)[source.count : stop])
        finish(job, work / "checkpoint", parallelism=parallelism, retained_epochs=1)
    expected.check(work)
    kept = epochs(work / "checkpoint")
    files = [f for op in kept[-1].operators.values() for part in op.ranges for f in part.files]
    assert any(file.kind == "base" for file in files)
    assert kept[0].number >= 20 and len(list((work / "checkpoint/epochs").iterdir())) < 15
