"""Rows that come back in a loop: they meet new rows, and are late where state is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import cairn.slot.level as level_module
from cairn import BatchProcess, Job, KeyedProcess, WindowFunction, sinks, windows
from cairn.plan.graph import Watermark
from cairn.slot.operator import Operator
from cairn.stream import Stream
from tests.simulation.led_job import LedJob, at
from tests.unit.plan.programs import source

TIMED = "k long, ts timestamp, v long"


class Hop(KeyedProcess[Any]):
    """Goes around until `v` is 0."""

    def process(self, row: Any, ctx: Any) -> Any:
        ctx.output("seen", tuple(row))
        return (row.k, row.ts, row.v - 1) if row.v else None

    def on_hops(self, row: Any, ctx: Any) -> Any:
        return self.process(row, ctx)

    def on_others(self, row: Any, ctx: Any) -> Any:
        return self.process(row, ctx)


class HopByBatch(BatchProcess):
    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        ctx.output("seen", batch)
        left = [row | {"v": row["v"] - 1} for row in batch.to_pylist() if row["v"]]
        return pa.RecordBatch.from_pylist(left, batch.schema)


class Listed(WindowFunction):
    def process(self, key: Any, window: Any, rows: Any, ctx: Any) -> Any:
        yield (sorted(row.v for row in rows),)


def timed(job: Job, name: str = "s") -> Stream:
    return source(job, name, TIMED, event_time="ts", watermark=Watermark(0))


def hops(loop: Stream) -> tuple[Stream, Stream]:
    """(what goes around, all rows on their way)."""
    hop = loop.key_by("k").process(Hop(), schema=TIMED, uid="hop")
    return hop, hop.side("seen", TIMED)


def seconds(sink: sinks.Collect, key: int) -> list[tuple[int, int]]:
    """(second, v) of the rows of a key."""
    return sorted((row.ts.second, row.v) for row in sink.rows if row.k == key)


# Types


@pytest.mark.parametrize("shape", ["plain", "connected", "by-batch"])
@pytest.mark.parametrize(
    "type_",
    [
        pa.struct(
            [
                pa.field("k", pa.int64()),
                pa.field("ts", pa.timestamp("us", "UTC")),
                pa.field("v", pa.int64(), nullable=False),
            ]
        ),
        pa.struct(
            [("k", pa.int64()), ("ts", pa.timestamp("us", "Europe/Berlin")), ("v", pa.int64())]
        ),
    ],
    ids=["never-null", "time-zone"],
)
def test_rows_that_come_back_meet_rows_of_other_types(
    type_: pa.DataType, shape: str, tmp_path: Path
) -> None:
    """Spark knows what is never null, and has a time zone; what was kept has the declared types."""
    job, out = Job("j", max_parallelism=8), sinks.Collect()
    others = source(job, "others", TIMED)

    def body(loop: Stream) -> Any:
        keyed: Any = loop.key_by("k")
        if shape == "connected":
            keyed = job.connect(others=others.key_by("k"), hops=keyed)
        function: Any = HopByBatch() if shape == "by-batch" else Hop()
        call = keyed.process_batch if shape == "by-batch" else keyed.process
        hop = call(function, schema=TIMED, uid="hop")
        hop.side("seen", TIMED).sink_to(out, uid="out")
        return hop, hop

    source(job, "s", TIMED).iterate(body, uid="loop")
    led = LedJob(job, tmp_path)
    for _ in range(3):
        rows = [(1, at(7), 2), (2, at(8), 1)]
        given = {"s": rows, "others": rows} if shape == "connected" else {"s": rows}
        led.run(type_=type_, **given)
    led.run_out()
    times = 6 if shape == "connected" else 3
    assert seconds(out, 1) == sorted([(7, 2), (7, 1), (7, 0)] * times)
    assert seconds(out, 2) == sorted([(8, 1), (8, 0)] * times)


# Lateness


def test_a_row_that_comes_back_is_not_late_for_a_function_that_forgets_nothing(
    tmp_path: Path,
) -> None:
    job, out = Job("j", max_parallelism=8), sinks.Collect()

    timed(job).iterate(hops, uid="loop").sink_to(out, uid="out")
    led = LedJob(job, tmp_path)
    led.run(s=[(1, at(1), 3)])
    led.run(s=[(2, at(50), 0)])
    led.run_out()
    assert seconds(out, 1) == [(1, v) for v in range(4)] and led.late_rows("hop") == 0


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_window_emits_once_and_what_comes_back_to_it_later_is_late(
    rounds: int, tmp_path: Path
) -> None:
    job, out, late = Job("j", max_parallelism=8), sinks.Collect(), sinks.Collect()

    def body(loop: Stream) -> Any:
        hop, _ = hops(loop)
        window = loop.key_by("k").window(windows.tumbling("10 seconds"))
        listed = window.process(Listed(), schema="vs array<bigint>", uid="window")
        listed.side("late").sink_to(late, uid="late")
        return hop, listed

    loop = timed(job).iterate(body, uid="loop", max_rounds_per_epoch=rounds)
    loop.sink_to(out, uid="out")
    led = LedJob(job, tmp_path)
    led.run(s=[(9, at(1), 0)])
    led.run(s=[(1, at(5), 4), (2, at(20), 0)])
    led.run_out()
    led.run(is_draining=True)
    # Closed in the epoch after: by its first round, also for the rounds that follow.
    in_time = [4 - v for v in range(rounds + 1)]
    assert [row.vs for row in out.rows if row.k == 1] == [tuple(sorted(in_time))]
    assert seconds(late, 1) == [(5, v) for v in range(4 - rounds)]
    assert led.late_rows("window") == 4 - rounds


@pytest.mark.parametrize("where", ["in the loop", "behind it"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_row_that_comes_back_too_late_does_not_pass_as_new(
    rounds: int, where: str, tmp_path: Path
) -> None:
    job, out, late = Job("j", max_parallelism=8), sinks.Collect(), sinks.Collect()

    def body(loop: Stream) -> Any:
        hop, seen = hops(loop)
        many = loop if where == "in the loop" else seen
        once = many.deduplicate(on="k", within="10 seconds", uid="once")
        once.side("late").sink_to(late, uid="late")
        return hop, once

    loop = timed(job).iterate(body, uid="loop", max_rounds_per_epoch=rounds)
    loop.sink_to(out, uid="out")
    led = LedJob(job, tmp_path)
    led.run(s=[(1, at(1), 9)])
    for second in (20, 40, 50):
        led.run(s=[(2, at(second), 0)])
    led.run_out()
    assert seconds(out, 1) == [(1, 9)]
    assert len(late.rows) == led.late_rows("once") > 0


def test_a_row_that_comes_back_too_late_is_no_row_of_a_join(tmp_path: Path) -> None:
    """What it would have met is gone: it would be alone, though it is not."""
    job, out, late = Job("j", max_parallelism=8), sinks.Collect(), sinks.Collect()
    others = timed(job, "others")

    def body(loop: Stream) -> Any:
        hop, _ = hops(loop)
        pairs = loop.join(others, on="k", within="5 seconds", how="left", uid="pairs")
        pairs.side("late.left").sink_to(late, uid="late")
        return hop, pairs

    timed(job).iterate(body, uid="loop").sink_to(out, uid="out")
    led = LedJob(job, tmp_path)
    led.run(s=[(1, at(1), 5)], others=[(1, at(2), 7)])
    led.run(s=[(2, at(30), 0)], others=[(2, at(30), 0)])
    led.run_out()
    led.run(is_draining=True)
    mine = [row for row in out.rows if row.k == 1]
    assert all(row.v_right == 7 for row in mine), mine
    assert len(mine) + len(late.rows) == 6 and len(late.rows) == led.late_rows("pairs") > 0


# How many at once


def test_rows_that_come_back_are_processed_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level_module, "RETURNED_ROWS_MAX", 8)
    pieces: list[int] = []
    run_returned = Operator.run_returned

    def counted(self: Operator, groups: Any, times: Any, rows: Any) -> None:
        assert len(groups) == len(times) == len(rows)
        pieces.append(len(rows))
        run_returned(self, groups, times, rows)

    monkeypatch.setattr(Operator, "run_returned", counted)
    job, out = Job("j", max_parallelism=8), sinks.Collect()

    timed(job).iterate(hops, uid="loop").sink_to(out, uid="out")
    led = LedJob(job, tmp_path, parallelism=1)
    led.run(s=[(1, at(n % 50), 1) for n in range(20)])
    led.run_out()
    assert pieces == [8, 8, 4]
    assert seconds(out, 1) == sorted([(n, v) for n in range(20) for v in (0, 1)])
