"""Slots as processes: how many, how long, how big; and that none is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.process_identity import identify
from cairn.protocol.envelope import Envelope
from cairn.protocol.messages import Token
from cairn.sinks.base import Execution
from cairn.slot.folders import run_folder
from cairn.slot.process import SlotHome
from cairn.slot.server import Call
from cairn.worker.forward import Forward
from tests.marks import for_soak
from tests.spark.programs.ledger import SCHEMA, payments
from tests.spark.support import (
    Input,
    Program,
    eventually,
    finish,
    published,
    slot_logs,
    slot_pids,
    stored_state,
)


class Who(KeyedProcess):
    """Emits the process it runs in and how often it was opened there."""

    n = state.Value("bigint", default=0)

    def __init__(self):
        self.opened = 0

    def open(self, ctx):
        self.opened += 1
        print(f"opened in subtask {ctx.subtask}")

    def process(self, row, ctx):
        self.n.set(self.n.get() + 1)
        print(f"saw {row.k}")
        yield row.k, ctx.subtask, os.getpid(), self.opened, self.n.get()

    def close(self):
        print("closed")


WHO = "k bigint, subtask int, pid bigint, opened int, n bigint"


def who_job(spark, rows, out, again):
    job = Job("who", max_parallelism=8)
    source = job.source("rows", rows.stream(spark))
    first = source.key_by("k").process(Who(), schema=WHO, uid="first")
    first.sink_to(out, uid="out")
    second = first.key_by("n").process(Who(), schema=WHO, uid="second")
    second.sink_to(again, uid="again")
    return job


def python_workers(spark):
    """Spark's Python daemon and its idle workers, of this session."""
    jvm = psutil.Process(spark.sparkContext._gateway.proc.pid)
    living = [child for child in jvm.children() if child.status() != "zombie"]
    daemons = [child for child in living if "pyspark.worker" in child.cmdline()]
    return daemons, [worker for daemon in daemons for worker in daemon.children()]


def is_gone(pid):
    """Or is one that only its parent has not noticed."""
    try:
        return psutil.Process(pid).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def test_slot_is_one_process_per_subtask_that_outlives_epochs_and_idle_workers(
    spark, make_input, tmp_path
):
    rows = make_input("k bigint").add_all([[(k,) for k in range(20)]] * 2)
    out, again = sinks.Collect(), sinks.Collect()
    job = who_job(spark, rows, out, again)
    with job.start(checkpoint=str(tmp_path / "c"), parallelism=2, trigger="0 seconds") as run:
        run.process_all_available()
        living = slot_pids(run._engine.coordinator.run_id)
        assert sorted(living) == [0, 1]
        attempts = []
        # Idle; Spark gives up its workers, then even the daemon that forks them.
        for victims in (1, 0):
            for process in python_workers(spark)[victims]:
                process.kill()
            rows.add(*[(k,) for k in range(20)])
            run.process_all_available()
            attempts.append(run.metrics().timings.attempts)
        assert attempts == [1, 1]
        assert slot_pids(run._engine.coordinator.run_id) == living
        for slot in run.slots():
            assert f"opened in subtask {slot.subtask}\n" in Path(slot.log).read_text()
        assert [slot.subtask for slot in run.slots()] == [0, 1]
    for sink in (out, again):
        assert {(row.subtask, row.pid) for row in sink.rows} == set(living.items())
        assert {row.opened for row in sink.rows} == {1}
    assert sorted((row.k, row.n) for row in out.rows) == [
        (k, n) for k in range(20) for n in range(1, 5)
    ]
    # Stopped, and gone; what they printed is in their logs.
    assert not slot_pids(run._engine.coordinator.run_id)
    assert eventually(lambda: all(is_gone(pid) for pid in living.values()))
    logs = slot_logs(run._engine.coordinator.run_id)
    assert logs.count("opened in subtask") == logs.count("closed") == 4
    assert logs.count("saw 7\n") >= 8
    assert "told to end" in logs
    assert not list(run_folder(run._engine.coordinator.run_id).glob("*/p-*"))


def test_job_that_fails_leaves_no_slot_behind(spark, make_input, tmp_path):
    class Fails(KeyedProcess):
        def process(self, row, ctx):
            raise RuntimeError("no")

        def close(self):
            raise RuntimeError("not even that")

    job = Job("fails", max_parallelism=8)
    source = job.source("rows", make_input("k bigint").add((1,)).stream(spark))
    source.key_by("k").process(Fails(), schema="k bigint", uid="fails")
    run = job.start(checkpoint=str(tmp_path / "c"), parallelism=2, trigger="available-now")
    with pytest.raises(Exception, match="raised RuntimeError: no"):
        run.wait(60)
    assert run.status == "failed"
    assert eventually(lambda: not slot_pids(run._engine.coordinator.run_id), within_s=5)


@pytest.mark.soak
def test_slot_that_cannot_close_ends_all_the_same(spark, make_input, tmp_path):
    noted = str(tmp_path / "pid")

    class Hangs(KeyedProcess):
        def process(self, row, ctx):
            Path(noted).write_text(str(os.getpid()))

        def close(self):
            time.sleep(3600)

    job = Job("hangs", max_parallelism=8)
    source = job.source("rows", make_input("k bigint").add((1,)).stream(spark))
    source.key_by("k").process(Hangs(), schema="k bigint", uid="hangs")
    finish(job, tmp_path / "c", parallelism=1)
    assert eventually(lambda: is_gone(int(Path(noted).read_text())))


# How drivers end


@pytest.fixture
def ledger(tmp_path):
    """Starts the ledger program on a little input; all that are left are killed."""
    source = Input(tmp_path / "in", SCHEMA).add_all(payments(2))
    programs = []

    def start(*arguments, **environment):
        program = Program("ledger", source.folder, tmp_path, *arguments, **environment)
        programs.append(program)
        return program

    start.input = source
    yield start
    for program in programs:
        program.__exit__()


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        # test_demo.py kills a driver whose slots must not outlive it.
        for_soak("driver killed"),
        for_soak("interrupted"),
        # tests/unit/slot/test_nursery.py has it without Spark.
        for_soak("executor killed"),
    ],
)
def test_slots_end_with_their_driver_and_executor(ledger, tmp_path, way):
    """In the middle of an epoch."""
    program = ledger("--trigger", "0 seconds", TRAP="sleep 60 2")
    run_id = program.await_report()["run"]
    program.await_report(epoch=3)
    assert sorted(slot_pids(run_id)) == [0, 1]
    ledger.input.add_all(payments(3)[2:])
    time.sleep(1)
    if way == "driver killed":
        program.process.kill()
    elif way == "interrupted":
        # As a terminal does it: to the whole group, JVM and Python workers included.
        os.killpg(program.process.pid, signal.SIGINT)
    else:
        (jvm,) = (c for c in psutil.Process(program.process.pid).children() if "java" in c.name())
        jvm.kill()
    assert eventually(lambda: not slot_pids(run_id), within_s=30)
    if way == "interrupted":
        program.end()
        assert program.process.returncode == -signal.SIGINT
        assert "Traceback" not in program.errors
        assert "told to end" in slot_logs(run_id)
    # The epoch under way is there as a whole, or not at all.
    ids = sorted(row["id"] for row in published(tmp_path / "booked"))
    assert ids in (list(range(60)), list(range(90)))


@pytest.mark.soak
@pytest.mark.slow
def test_slots_end_when_idle_past_their_lease_but_not_while_busy_and_when_spark_stops(
    ledger, tmp_path
):
    """A batch takes longer than the lease; then the job idles, is fed again, and Spark stops."""
    program = ledger(
        *("--trigger", "0 seconds", "--stop-spark-at", 4, "--parallelism", 1),
        CAIRN_SLOT_LEASE_S="3",
        TRAP="sleep 5 6",
    )
    run_id = program.await_report()["run"]
    program.await_report(epoch=3)
    assert "idle" not in slot_logs(run_id)
    assert eventually(lambda: not slot_pids(run_id), within_s=10)
    assert slot_logs(run_id).count("idle for") == 1
    ledger.input.add_all(payments(3)[2:])
    program.await_report(stopped="spark")
    assert eventually(lambda: not slot_pids(run_id), within_s=10)
    assert program.process.poll() is None, "the driver itself still runs"
    ids = sorted(row["id"] for row in published(tmp_path / "booked"))
    assert ids == list(range(90))


# Size


class Wide(KeyedProcess):
    bytes_seen = state.Value("bigint", default=0)

    def process(self, row, ctx):
        self.bytes_seen.set(self.bytes_seen.get() + len(row.payload))
        if row.id % 1000 == 0:
            yield row.id, high_water_mb(os.getpid())


def high_water_mb(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@pytest.mark.soak
@pytest.mark.slow
def test_epoch_larger_than_slots_and_workers_may_grow_streams_through(spark, make_input, tmp_path):
    count, payload_bytes = 250_000, 8000
    # A few ids a row: Spark holds all that one row explodes into at once.
    ids = make_input("first bigint").add(*[(first,) for first in range(0, count, 1000)])
    out = sinks.Collect()
    job = Job("wide", max_parallelism=8)
    wide = job.source("ids", ids.stream(spark)).transform(
        lambda df: df.selectExpr("explode(sequence(first, first + 999)) AS id").selectExpr(
            "id", "id % 1000 AS k", f"repeat(chr(65 + id % 26), {payload_bytes}) AS payload"
        )
    )
    wide.key_by("k").process(Wide(), schema="id bigint, mb double", uid="wide").sink_to(
        out, uid="out"
    )
    finish(job, tmp_path / "c")
    stored = stored_state(job, tmp_path / "c")["wide"]["bytes_seen"]
    assert sum(stored.values()) == count * payload_bytes
    data_mb = count * payload_bytes / 2**20
    assert max(row.mb for row in out.rows) < data_mb / 5
    _, workers = python_workers(spark)
    assert max(high_water_mb(worker.pid) for worker in workers) < data_mb / 5


class Burst(KeyedProcess):
    def process(self, row, ctx):
        for i in range(row.times):
            yield row.k, i, "x" * row.size


class Received(KeyedProcess):
    n = state.Value("bigint", default=0)
    total = state.Value("bigint", default=0)

    def process(self, row, ctx):
        self.n.set(self.n.get() + 1)
        self.total.set(self.total.get() + len(row.text))


@pytest.mark.slow
def test_output_a_hundred_times_the_input_neither_blocks_nor_piles_up(spark, make_input, tmp_path):
    """Many small rows out of each, and a few huge ones."""
    rows = make_input("k bigint, times int, size int")
    rows.add(*[(k, 100, 10) for k in range(400)], *[(k, 100, 30_000) for k in range(60)])
    job = Job("burst", max_parallelism=8)
    burst = job.source("rows", rows.stream(spark)).key_by("k")
    burst = burst.process(Burst(), schema="k bigint, i int, text string", uid="burst")
    burst.key_by("i").process(Received(), schema="x int", uid="received")
    finish(job, tmp_path / "c")
    stored = stored_state(job, tmp_path / "c")["received"]
    assert set(stored["n"].values()) == {460} and len(stored["n"]) == 100
    assert sum(stored["total"].values()) == 400 * 100 * 10 + 60 * 100 * 30_000


# The forwarder, without Spark


class _Server(flight.FlightServerBase):
    """A slot that only reads."""

    def do_exchange(self, context, descriptor, reader, writer):
        writer.begin(pa.schema([("ack", pa.binary())]))
        while True:
            try:
                reader.read_chunk()
            except StopIteration:
                return


def test_forwarder_whose_input_breaks_off_fails_instead_of_waiting(tmp_path):
    """As when Spark cannot fetch the shuffle: the slot waits for rows, nobody may wait for it."""
    rows = Envelope(((0, pa.schema({"k": pa.int64()})),))
    forward = Forward("run", 0, (0,), rows, Envelope(()), 4, "", b"", None)
    batch = pa.RecordBatch.from_pydict({"group": pa.array([0], pa.int32()), "c0": [1]})

    def broken():
        yield batch
        raise EOFError("the other end is gone")

    location = f"grpc+unix://{tmp_path}/s"
    with _Server(location), flight.connect(location) as client, pytest.raises(EOFError):
        call = Call(Token(1, 1, Execution(), 1), "", 0, 0)
        list(forward._forward(client, call, range(4), broken()))


def test_dead_slot_is_not_taken_for_a_living_one(tmp_path):
    """Nobody has to have collected its exit code: a zombie is dead."""
    home = SlotHome("zombie-test-run", identify(), 0)
    pid = home.start().process.pid
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: home.find() is None)
    again = home.start().process.pid
    assert again != pid
    os.kill(again, signal.SIGKILL)
