"""Killed while something is under way: a rescale, an upgrade, a base, an upload, a rollback.

As in test_crashes, everything is compared with the same job on the same input, undisturbed.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from types import SimpleNamespace

import psutil
import pytest

from cairn.driver.coordinator import compaction
from cairn.ids import new_id
from cairn.runtime_folder import runtime_root
from cairn.slot.folders import living_slots
from cairn.snapshots.rollback import rollback
from cairn.snapshots.verify_redis import verify_redis
from cairn.storage.log import Log
from cairn.storage.references import files_of
from cairn.storage.store import open_store
from cairn.testing import call_at_points
from tests import servers
from tests.backends import SERVERS, backend_name
from tests.marks import for_soak
from tests.s3 import s3_server
from tests.spark.live import FILES, Live
from tests.spark.programs.ledger import SCHEMA, build, payments
from tests.spark.standing import Impatient, Standing, Stands
from tests.spark.support import Input, Program, by_id, epochs, eventually, finish, published
from tests.spark.test_crashes import BESIDE, SINKS, Armed, Undisturbed, crash_chains


def with_bases(backend):
    """Environment of a program that writes a base after every epoch."""
    return "--backend", backend_name(backend), "--bases"


ROCKSDB = with_bases("rocksdb")


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory):
    return Undisturbed(spark, tmp_path_factory.mktemp("undisturbed"), 8)


@pytest.fixture(scope="module")
def short(spark, tmp_path_factory):
    return Undisturbed(spark, tmp_path_factory.mktemp("short"), FILES)


@pytest.fixture
def bases(monkeypatch):
    """After every epoch a base is due, and nothing is so small that it travels to the driver."""
    monkeypatch.setattr(compaction, "BASE_BYTES_MIN", 0)
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    monkeypatch.setattr("cairn.driver.coordinator.epoch.INLINE_BYTES_MAX", 0)


def has_base(checkpoint):
    """Whether the newest epoch goes back to bases."""
    operators = epochs(checkpoint)[-1].operators.values()
    return any(ref.kind == "base" for op in operators for part in op.ranges for ref in part.files)


# The driver


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["rocksdb", "postgres", "redis"])
def test_driver_killed_around_a_live_change_loses_and_doubles_nothing(
    spark, undisturbed, tmp_path, bases, backend
):
    """With bases on their way in every epoch.

    The second epoch of each driver is the first with another parallelism and function.
    What a driver does between its records does not depend on the change: those points are
    in test_sink_kills and `make soak`, and all of them with changes in the simulation.
    """
    points = [
        [
            ("driver.epoch.begun", 2),
            ("driver.epoch.ran", 2),
            ("driver.deployed", 1),
        ],
        [
            ("driver.manifest.written", 2),
            ("driver.collected", 2),
            # A batch that was committed already is skipped first.
            ("driver.epoch.ended", 3),
        ],
    ]
    crash_chains(
        spark,
        undisturbed,
        *(
            (
                tmp_path / str(chain),
                [
                    # From one subtask to four, from two to one, from three to two.
                    (*point, "--change", f"1:rescale={(4, 1, 2)[number % 3]}", "1:upgrade")
                    for number, point in enumerate(links)
                ],
                *with_bases(backend),
            )
            for chain, links in enumerate(points)
        ),
        backend=backend_name(backend),
    )
    # The last driver of a chain may be done before its first base is.
    assert any(has_base(tmp_path / str(chain) / "checkpoint") for chain in range(2))


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_driver_killed_during_an_upload_and_then_a_slot_lose_nothing_on_s3(short, tmp_path):
    """Spark has no file system for S3 here: its folder is on the driver's disk."""
    with s3_server() as s3, s3.in_environment():
        url = f"{s3.url}/checkpoint"
        arguments = (*ROCKSDB, "--checkpoint", url)
        program = ("ledger", short.input.folder, tmp_path, *arguments)
        held = tmp_path / "held"
        with Program(*program, HOLD=f"slot.sst.uploaded 20 {held}") as first:
            assert eventually(held.exists, within_s=120)
            first.kill()
        assert short.check_prefix(tmp_path) < short.files
        died = tmp_path / "died"
        crash = {"CAIRN_CRASH_AT": "slot.sst.uploaded:2", "CAIRN_CRASH_ONCE": str(died)}
        with Program(*program, **crash) as second:
            assert second.end()[-1]["end"] == "finished", second.errors[-2000:]
        assert died.exists()
        assert has_base(url)
        short.check(tmp_path, url)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_drivers_killed_between_a_rollback_and_the_first_epoch_after_it_change_nothing(
    spark, short, tmp_path
):
    source = Input(tmp_path / "in", SCHEMA).add_all(payments(FILES)[:4])
    at = tmp_path / "checkpoint"
    job = build(spark, source.folder, tmp_path)
    finish(job, at, backend="rocksdb")
    before = {sink: {file.name for file in (tmp_path / sink).glob("*.parquet")} for sink in SINKS}
    target = epochs(at)[1]
    restore = rollback(open_store(str(at)), target.number)
    for point in ("driver.takeover.written", "driver.rewind.laid"):
        crash = {"CAIRN_CRASH_AT": point}
        arguments = ("--backend", "rocksdb", "--parallelism", 3)
        with Program("ledger", source.folder, tmp_path, *arguments, **crash) as program:
            program.end()
        assert program.killed, program.errors[-2000:]
        assert epochs(at)[-1].number == target.number
        for sink in SINKS:
            found = {file.name for file in (tmp_path / sink).glob("*.parquet")}
            assert found == before[sink], "nothing is published, nothing taken back"
    source.add_all(payments(FILES)[4:])
    finish(job, at, backend="rocksdb")
    short.check_state(at)
    # What was undone stays published, beside an output that is that of an undisturbed run.
    lineage = {epoch.number for epoch in epochs(at)}
    assert not lineage & set(range(target.number + 1, restore.number))
    for sink in SINKS:
        (tmp_path / "lineage" / sink).mkdir(parents=True)
        for file in (tmp_path / sink).glob("*.parquet"):
            if int(file.name.split("-")[1]) in lineage:
                shutil.copy(file, tmp_path / "lineage" / sink)
            else:
                assert file.name in before[sink]
    assert short.check_prefix(tmp_path / "lineage") == FILES
    doubled = by_id(published(tmp_path / "booked"))
    assert len(doubled) == len(short.rows["booked"]) + 2 * 30


# Slots


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "point"),
    [
        for_soak("heap", "slot.base.begun"),
        ("rocksdb", "slot.sst.uploaded"),
        *(
            for_soak("rocksdb", point)
            for point in ("slot.restored", "slot.base.begun", "slot.base.written")
        ),
        # The simulation has these in every `make test`.
        *(
            for_soak(backend, point)
            for backend in SERVERS
            for point in BESIDE
            if point != "slot.sst.uploaded"
        ),
    ],
)
def test_slots_killed_while_they_restore_for_a_rescale_or_write_bases_change_nothing(
    spark, short, tmp_path, bases, backend, point
):
    """Each subtask's slot once: when it restores after 2, 3, 2 subtasks, or beside an epoch."""
    function = Armed(point, 1, tmp_path / "once")
    with Live(spark, tmp_path, function=function, backend=backend_name(backend)) as live:
        live.feed(2)
        live.run.rescale(3)
        live.feed(2)
        live.run.rescale(2)
        live.feed(2)
    assert {"once-0", "once-1"} <= {path.name for path in tmp_path.glob("once-*")}
    assert live.run.error is None
    assert has_base(tmp_path / "checkpoint")
    short.check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_empty", [True, for_soak(False)])
def test_redis_killed_and_started_again_changes_nothing(spark, short, tmp_path, bases, is_empty):
    server = servers.RedisServer()
    try:
        with Live(spark, tmp_path, function=Impatient(), backend=server.url) as live:
            live.feed(3)
            server.kill()
            back = threading.Timer(3, server.start, kwargs={"is_empty": is_empty})
            back.start()
            live.run.rescale(3)
            live.feed(2)
            back.join()
            live.feed(1)
            client = server.client()
            # Applied in the background, after the epoch.
            assert eventually(lambda: list(client.scan_iter(match="cairn:*:rows"))), "applied"
        assert live.run.error is None
        assert verify_redis(open_store(str(tmp_path / "checkpoint"))).damage == []
    finally:
        server.kill()
    short.check(tmp_path)


DRIVER_POINTS = (
    "driver.takeover.written", "driver.rewind.laid", "driver.recovered", "driver.epoch.begun",
    "driver.epoch.ran", "driver.pack.written", "driver.manifest.written", "driver.sink.begun",
    "driver.sink.unmarked", "driver.sink.committed", "driver.sinks.committed", "driver.collected",
    "driver.epoch.ended", "driver.deployed",
)  # fmt: skip
"""The points that the job of these tests passes."""


@pytest.fixture
def database(backend):
    """A server of state that can be killed, and the URL of the state in it."""
    if backend == "redis":
        server = servers.RedisServer()
        url = server.url
    else:
        server = servers.Postgres()
        url = server.new_database()
    yield SimpleNamespace(server=server, url=url)
    server.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", [for_soak("postgres"), "redis"])
def test_the_database_killed_at_every_point_of_a_slot_changes_nothing(
    spark, short, tmp_path, bases, database
):
    """The slot stands at the point while the server is killed and started again."""
    stands = Stands(tmp_path / "points")

    def kill_and_start():
        database.server.kill()
        database.server.start()

    with (
        stands.served_by(kill_and_start),
        Live(spark, tmp_path, function=Standing(stands.folder), backend=database.url) as live,
    ):
        live.feed(2)
        stands.arm()
        live.run.rescale(3)
        live.feed(4)
        assert eventually(lambda: not stands.left()), stands.left()
    assert live.run.error is None
    assert verify_redis(open_store(str(tmp_path / "checkpoint"))).damage == []
    short.check(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", SERVERS)
def test_the_database_killed_at_every_point_of_a_driver_changes_nothing(
    spark, short, tmp_path, bases, database
):
    with Live(spark, tmp_path, function=Impatient(), backend=database.url) as live:
        live.feed(2)
    left = set(DRIVER_POINTS)

    def kill_once(point):
        if point in left:
            left.remove(point)
            database.server.kill()
            database.server.start()

    options = {"retained_epochs": 2, "backend": database.url}
    with (
        call_at_points(kill_once),
        Live(spark, tmp_path, function=Impatient(), **options) as live,
    ):
        live.feed(2)
        live.run.rescale(3)
        live.feed(2)
    assert live.run.error is None
    assert not left, "points that were not reached"
    assert verify_redis(open_store(str(tmp_path / "checkpoint"))).damage == []
    short.check(tmp_path)


def find_shown(secret, *folders):
    """Return the places that show a text to others: arguments of processes, and files."""
    processes = psutil.process_iter(["cmdline"])
    words = [word for process in processes for word in process.info["cmdline"] or ()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in files), "slots have logs"
    return [word for word in words if secret in word] + [
        path for path in files if secret.encode() in path.read_bytes()
    ]


@pytest.mark.slow
def test_the_database_of_state_killed_and_started_again_changes_nothing(
    spark, short, tmp_path, bases
):
    server = servers.postgres()
    # The server asks for no password, so any is right.
    password = new_id()
    url = backend_name("postgres").replace("postgres:@", f"postgres:{password}@")
    with Live(spark, tmp_path, backend=url) as live:
        live.feed(3)
        server.kill()
        back = threading.Timer(3, server.start)
        back.start()
        # Another parallelism: slots must read from the database, and wait for it.
        live.run.rescale(3)
        live.feed(2)
        back.join()
        live.feed(1)
        assert find_shown(password, tmp_path, runtime_root()) == []
    assert live.run.error is None
    files = [file for epoch in epochs(tmp_path / "checkpoint") for file in files_of(epoch)]
    assert any(file.format == "postgres" for file in files)
    short.check(tmp_path)


# Executors


def executor_of(slot_pid):
    """The process of the executor beside which a slot lives: its folder is named for it."""
    runs = runtime_root().glob("*")
    (slot,) = (s for run in runs for s in living_slots(run) if s.process.pid == slot_pid)
    executor = psutil.Process(slot.executor_pid)
    assert "java" in executor.name()
    return executor


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_executor_killed_while_its_slot_restores_for_a_rescale_changes_nothing(short, tmp_path):
    """2, 4, 2 subtasks on two executors, in a cluster of processes; the query never stops."""
    source = Input(tmp_path / "in", SCHEMA).add_all(payments(FILES)[:2])
    held = tmp_path / "held"
    arguments = ("--trigger", "0 seconds", "--master", "local-cluster[2,1,1024]")
    arguments += ("--change", "2:rescale=4", "4:rescale=2")
    with Program(
        "ledger", source.folder, tmp_path, *arguments, HOLD=f"slot.restored 5 {held}"
    ) as program:
        before = [program.await_report(epoch=number)["placement"] for number in (2, 3)][-1]
        assert len(set(before.values())) == 2, "subtasks are spread over executors"
        source.add(*payments(FILES)[2])
        assert eventually(held.exists, within_s=60)
        victim = executor_of(int(held.read_text()))
        victim.kill()
        placement = program.await_report(epoch=4)["placement"]
        assert placement.keys() == {"0", "1", "2", "3"}
        assert victim.pid not in {int(place.rpartition(":")[2]) for place in placement.values()}
        assert short.check_prefix(tmp_path) == 3
        source.add_all(payments(FILES)[3:])
        for number in (5, 6, 7):
            placement = program.await_report(epoch=number)["placement"]
        assert placement.keys() == {"0", "1"}
        os.killpg(program.process.pid, signal.SIGINT)
        program.end()
    short.check(tmp_path)
    log = Log(open_store(str(tmp_path / "checkpoint")))
    assert [epoch.operators["ledger"].parallelism for epoch in log.lineage()] == [2, 2, 4, 4, 2, 2]
