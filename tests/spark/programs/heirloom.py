"""A job with every kind of state, and how the checkpoints in tests/heirloom were made.

    python -m tests.spark.programs.heirloom <target folder>

An heirloom is a checkpoint or savepoint written by an earlier cairn, and the state that the
same cairn reached after more input. A newer cairn must start from it and reach that state too.
Run this with the code whose format is to be kept, never to make a failing test pass.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import operator
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import cairn
from cairn import Job, KeyedProcess, Process, WindowFunction, sinks, state, windows
from cairn.cli import main as main_of_cli
from tests.spark.support import T0, Input

SCHEMA = "id bigint, k string, v bigint, ts timestamp"
RULES = "kind string, value bigint"
FILES = 4
"""Input files before the heirloom is made, and again after it."""
PLACE = Path("/tmp/cairn-heirloom")
"""Input lies here, always: a file source's log names its files by their absolute path."""


class Mean:
    """Average as a one-step aggregate over (count, sum)."""

    def create(self) -> tuple[int, int]:
        return 0, 0

    def add(self, acc: Any, value: int) -> tuple[int, int]:
        return acc[0] + 1, acc[1] + value

    def merge(self, left: Any, right: Any) -> tuple[int, int]:
        return left[0] + right[0], left[1] + right[1]

    def result(self, acc: Any) -> float:
        return acc[1] / acc[0] if acc[0] else 0.0


class Kinds(KeyedProcess[Any]):
    """Keeps something in every kind of keyed state, with and without a ttl, and a timer."""

    last = state.Value("struct<id:bigint,price:decimal(10,2),at:timestamp>")
    fresh = state.Value("string", ttl=state.TTL("1 day", clock="event"))
    total = state.Reducing("bigint", operator.add)
    mean = state.Aggregating("struct<n:bigint,s:bigint>", Mean())
    recent = state.List("bigint")
    seen = state.Map("string", "bigint")
    tags = state.Value("array<string>")
    pickled = state.Value(object)

    def process(self, row: Any, ctx: Any) -> None:
        self.last.set((row.id, Decimal(row.v).scaleb(-2), row.ts))
        self.fresh.set(f"{row.k}-{row.id}-ü")
        self.total.add(row.v)
        self.mean.add(row.v)
        self.recent.append(row.id)
        if len(list(self.recent)) > 5:
            self.recent.set(list(self.recent)[1:])
        self.seen[str(row.v % 7)] = row.id
        self.tags.set([row.k, str(row.id)])
        self.pickled.set({"id": row.id})
        ctx.timers.event(after="1 minute")

    def on_timer(self, time_ms: int, ctx: Any) -> None:
        self.seen["fired"] = time_ms


class Limits(KeyedProcess[Any]):
    """Counts rows above a limit that is broadcast."""

    limits = state.Broadcast("string", "bigint")
    above = state.Value("bigint", default=0)

    def process_broadcast(self, row: Any, ctx: Any) -> None:
        self.limits[row.kind] = row.value

    def process(self, row: Any, ctx: Any) -> None:
        if row.v > self.limits.get("v", 50):
            self.above.set(self.above.get() + 1)


class Waiting(Process[Any]):
    """Keeps every row's id in operator state."""

    ids = state.OperatorList("bigint", redistribute="split")

    def process(self, row: Any, ctx: Any) -> None:
        if row.id % 10 == 0:
            self.ids.append(row.id)


class Hops(KeyedProcess[Any]):
    """Passes a number around a loop until it is 0, and counts what came by."""

    hops = state.Value("bigint", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.hops.set(self.hops.get() + 1)
        if row.left > 0:
            yield row.node + 1, row.left - 1


class Spread(WindowFunction):
    def process(self, key: Any, window: Any, rows: Any, ctx: Any) -> Any:
        values = [row.v for row in rows]
        yield max(values) - min(values), len(values)


def build(spark: Any, input_folder: Path, rule_folder: Path, output: Path) -> Job:
    job = Job("heirloom", max_parallelism=32)
    rows = job.source(
        "rows", Input(input_folder, SCHEMA).stream(spark), event_time="ts", watermark="10 seconds"
    )
    rules = job.source("rules", Input(rule_folder, RULES).stream(spark))
    by_key = rows.key_by("k")
    drop = sinks.Noop()
    by_key.process(Kinds(), schema="id bigint", uid="kinds").sink_to(drop, uid="kinds-out")
    by_key.broadcast(rules, Limits.limits).process(
        Limits(), schema="id bigint", uid="limits"
    ).sink_to(drop, uid="limits-out")
    rows.process(Waiting(), schema="id bigint", uid="waiting").sink_to(drop, uid="waiting-out")
    by_key.aggregate(
        uid="totals", n="count(*)", total="sum(v)", least="min(v)", newest="last(id)"
    ).sink_to(drop, uid="totals-out")
    for name, kind in (
        ("tumbling", windows.tumbling("1 minute")),
        ("session", windows.session("30 seconds")),
    ):
        by_key.window(kind).aggregate(n="count(*)", total="sum(v)", uid=name).sink_to(
            sinks.Files(str(output / name)), uid=f"{name}-out"
        )
    by_key.window(windows.sliding("2 minutes", "1 minute")).process(
        Spread(), schema="spread bigint, n bigint", uid="spread"
    ).sink_to(sinks.Files(str(output / "spread")), uid="spread-out")
    rows.join(rows, on="k", within="5 seconds", uid="pairs").sink_to(drop, uid="pairs-out")
    rows.deduplicate(on=["k", "v"], within="1 minute", uid="once").sink_to(drop, uid="once-out")

    def body(loop: Any) -> Any:
        on = loop.key_by("node").process(Hops(), schema="node bigint, left bigint", uid="hops")
        return on, on

    hops = rows.transform(lambda df: df.selectExpr("v AS node", "id % 3 AS left"))
    hops.iterate(body, uid="loop").sink_to(drop, uid="loop-out")
    return job


def feed(folder: Path, first: int, schema: str = SCHEMA) -> Input:
    """Write FILES files that follow on `first` others."""
    given = Input(folder, schema)
    given.count = first
    for file in range(first, first + FILES):
        if schema == RULES:
            given.add(("v", 40 + file))
            continue
        given.add(
            *(
                (
                    file * 20 + n,
                    None if n == 19 else f"key-{n % 8}",
                    (file * 31 + n * 17) % 100,
                    T0 + dt.timedelta(seconds=file * 40 + n * 2),
                )
                for n in range(20)
            )
        )
    return given


def run_part(spark: Any, checkpoint: Path, first: int, backend: str, **more: Any) -> None:
    """Run the job over one half of the input."""
    inputs = [PLACE / "rows", PLACE / "rules"]
    for name, schema in zip(inputs, (SCHEMA, RULES), strict=True):
        feed(name, first, schema)
    job = build(spark, inputs[0], inputs[1], PLACE / "out")
    with job.start(
        checkpoint=str(checkpoint), parallelism=2, trigger="available-now", backend=backend, **more
    ) as run:
        assert run.wait(280), "the run did not end"


def ask(*arguments: str) -> Any:
    """Run a command of the CLI in this process; return the JSON that it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main_of_cli([*arguments, "--json"])
    return json.loads(printed.getvalue())


def dump_state(checkpoint: Path) -> dict[str, list[str]]:
    """{operator.state: rows} of the newest epoch, as `cairn state --json` prints them."""
    return {
        f"{entry['operator']}.{entry['state']}": sorted(
            json.dumps(row)
            for row in ask(
                "state", str(checkpoint), entry["operator"], entry["state"], "--limit", "0"
            )["rows"]
        )
        for entry in ask("state", str(checkpoint))["states"]
    }


def make(spark: Any, folder: Path, backend: str) -> Iterator[tuple[str, Path]]:
    """Yield the folders to keep, with their names; then write the state that must follow."""
    checkpoint = folder / backend
    run_part(spark, checkpoint, 0, backend)
    yield f"checkpoint-{backend}", checkpoint
    if backend == "heap":
        savepoint = folder / "savepoint"
        ask("savepoint", str(checkpoint), str(savepoint))
        yield "savepoint", savepoint
    run_part(spark, checkpoint, FILES, backend)
    (folder / "state.json").write_text(json.dumps(dump_state(checkpoint), indent=1))


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    # Deltas this small would never be merged into a base.
    os.environ["CAIRN_BASE_RATIO"] = "0.01"
    spark = cairn.session("heirloom", master="local[2]", ui__enabled=False)
    states = {}
    for backend in ("heap", "rocksdb"):
        folder = Path(tempfile.mkdtemp(prefix="heirloom-"))
        shutil.rmtree(PLACE, ignore_errors=True)
        for name, kept in make(spark, folder, backend):
            with tarfile.open(target / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(kept, arcname=name)
        states[backend] = (folder / "state.json").read_text()
    assert states["heap"] == states["rocksdb"], "the two backends disagree"
    (target / "state.json").write_text(states["heap"] + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
