"""The driver program of the crash tests: accounts with every kind of state, three outputs.

    python -m tests.spark.programs.ledger <input> <work> [--parallelism n] [--trigger t] …

--change takes effect in a known epoch: it is asked for on Spark's thread, between two of them.
Reports in lines of JSON: {"run": id} when it has started, {"epoch": n} as epochs are
committed, {"end": status, "error": …} last.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import time
from pathlib import Path
from typing import Any

from cairn import Job, KeyedProcess, crash, sinks, state
from tests.spark.support import Input, epoch_of

SCHEMA = "id bigint, account string, amount bigint"


class Ledger(KeyedProcess[Any]):
    """Count, sum, list and map per account; every payment out, large ones on the side."""

    count = state.Value("bigint", default=0)
    total = state.Reducing("bigint", operator.add)
    last = state.List("bigint")
    by_size = state.Map("bigint", "bigint")
    trap = ""
    hold = ""

    def __init__(self) -> None:
        # Read in the driver: a slot may have been started with another environment.
        self.trap = os.environ.get("TRAP", "")
        self.hold = os.environ.get("HOLD", "")

    def open(self, ctx: Any) -> None:
        hold(self.hold)

    def process(self, row: Any, ctx: Any) -> Any:
        trap(row, self.trap)
        self.count.set(self.count.get() + 1)
        self.total.add(row.amount)
        self.last.append(row.id)
        if len(self.last) > 5:
            self.last.set(list(self.last)[-3:])
        size = row.amount // 100
        self.by_size[size] = self.by_size.get(size, 0) + 1
        if self.by_size[size] > 4:
            del self.by_size[size]
        if row.amount >= 900:
            ctx.output("large", (row.id, row.account))
        yield row.id, row.account, self.count.get(), self.total.get(), row.amount // 250


class Spread(KeyedProcess[Any]):
    """Keyed differently: how many payments of a size, over all accounts."""

    seen = state.Value("bigint", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        return (row.id, row.size, self.seen.get())


class Late(Ledger):
    """Begins epochs late, in every subtask: TRAP="late 4-12 3" after the epochs 4 to 11, by 3 s."""

    def on_epoch_committed(self, epoch: int) -> None:
        _, epochs, seconds = self.trap.split()
        first, end = map(int, epochs.split("-"))
        if first <= epoch < end:
            time.sleep(float(seconds))


class Ledger2(Ledger):
    """The same function to those who look at its output: for an upgrade on the way."""


def trap(row: Any, trouble: str) -> None:
    """Trouble on demand, from the environment: TRAP="sleep 5 0.1" at id 5, "fail 7 2 file".

    "sleep 60-90 0.1" is at the ids from 60 on, up to 89.
    """
    what, *arguments = trouble.split() or [""]
    if what in ("", "late"):
        return
    first, _, end = arguments[0].partition("-")
    if end and not int(first) <= row.id < int(end):
        return
    if not end and first not in ("*", str(row.id)):
        return
    if what == "sleep":
        time.sleep(float(arguments[1]))
    else:
        times, mark = int(arguments[1]), Path(arguments[2])
        done = len(mark.read_bytes()) if mark.exists() else 0
        if done < times:
            with mark.open("ab") as file:
                file.write(b"x")
            raise RuntimeError(f"trapped at {row.id}")


def hold(where: str) -> None:
    """Make a slot stay at a crash point, the first that comes there: HOLD="slot.restored 3 file".

    The file tells its process id.
    """
    point, seconds, mark = where.split() or ("", "0", "")

    def stay(name: str) -> None:
        if name == point and not Path(mark).exists():
            Path(f"{mark}.new").write_text(str(os.getpid()))
            Path(f"{mark}.new").rename(mark)
            time.sleep(float(seconds))

    if point:
        crash._told = stay


def build(spark: Any, input_folder: Any, work: Any, function: Any = None) -> Job:
    work = Path(work)
    job = Job("ledger", max_parallelism=16)
    payments = job.source("payments", Input(Path(input_folder), SCHEMA).stream(spark))
    booked = payments.key_by("account").process(
        function or (Late() if os.environ.get("TRAP", "").startswith("late") else Ledger()),
        schema="id bigint, account string, n bigint, total bigint, size bigint",
        uid="ledger",
    )
    booked.sink_to(sinks.Files(str(work / "booked")), uid="booked")
    booked.side("large", "id bigint, account string").sink_to(
        sinks.Files(str(work / "large")), uid="large"
    )
    spread = booked.key_by("size").process(
        Spread(), schema="id bigint, size bigint, seen bigint", uid="spread"
    )
    spread.sink_to(sinks.Files(str(work / "spread")), uid="spread-out")
    return job


def payments(files: int, rows: int = 30, accounts: int = 7) -> list[list[tuple[int, str, int]]]:
    """The input: `id` counts through, so that any row that is lost or doubled shows."""
    ids = range(files * rows)
    all_rows = [(i, f"a{i * i % accounts}", i * 7919 % 1000) for i in ids]
    return [all_rows[at : at + rows] for at in range(0, len(all_rows), rows)]


def report(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def change_between_epochs(changes: list[str]) -> None:
    """Ask for "2:rescale=4" when two epochs of this run are committed, before the third."""
    from cairn.driver.engine import Engine

    run_batch = Engine._run_batch
    done = 0

    def changing(engine: Any, position: Any, rows: Any, **more: Any) -> None:
        nonlocal done
        while changes and done >= int(changes[0].partition(":")[0]):
            change(engine.changes, changes.pop(0).partition(":")[2])
        newest = engine.coordinator.newest
        run_batch(engine, position, rows, **more)
        # An epoch may have several batches.
        done += engine.coordinator.newest is not newest

    Engine._run_batch = changing  # type: ignore[method-assign, assignment]


def change(changes: Any, what: str) -> None:
    name, _, value = what.partition("=")
    if name == "rescale":
        changes.rescale(int(value))
    else:
        changes.upgrade("ledger", Ledger2(), allow_dropped_state=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("work")
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--trigger", default="available-now")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--retained", type=int, default=10)
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--spark-checkpoint", default=None)
    parser.add_argument(
        "--change",
        nargs="*",
        default=[],
        metavar="EPOCHS:WHAT",
        help="after so many epochs of this run: 2:rescale=4, 3:upgrade",
    )
    parser.add_argument("--savepoint", default=None)
    parser.add_argument("--guarantee", default="exactly-once")
    parser.add_argument("--checkpoint-every", type=int, default=1)
    parser.add_argument("--bases", action="store_true", help="after every epoch a base is due")
    parser.add_argument("--ha", default=None)
    parser.add_argument("--standby", default="warm")
    parser.add_argument("--conf", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--stop-spark-at", type=int, default=None, metavar="EPOCH")
    options = parser.parse_args()

    import cairn
    from cairn.driver.coordinator import compaction

    if options.bases:
        compaction.BASE_BYTES_MIN = 0
        os.environ["CAIRN_BASE_RATIO"] = "0"
    change_between_epochs(options.change)
    spark = cairn.session(
        "ledger",
        master=options.master,
        ui__enabled=False,
        # On a busy machine a subtask would rather move than wait: it is placement that is tested.
        **({} if options.conf else {"locality__wait": "60s"}),
        **dict(setting.partition("=")[::2] for setting in options.conf),
    )
    job = build(spark, options.input, options.work)
    run = job.start(
        checkpoint=options.checkpoint or f"{options.work}/checkpoint",
        spark_checkpoint=options.spark_checkpoint,
        parallelism=options.parallelism,
        backend=options.backend,
        guarantee=options.guarantee,
        checkpoint_every=options.checkpoint_every,
        trigger=options.trigger,
        retained_epochs=options.retained,
        savepoint=options.savepoint,
        ha=options.ha,
        standby=options.standby,
    )
    try:
        with run:
            report(run=run._engine.coordinator.run_id)
            newest = 0
            while not (run.wait(0.02) if options.ha else run._engine.ended.wait(0.02)):
                now = epoch_of(run)
                # An epoch counts when it is committed; its sinks publish after that.
                if now != newest and run._engine.coordinator.is_published:
                    newest = now
                    driver = run._engine.driver
                    told: dict[str, Any] = {}
                    if not options.master.startswith("local["):
                        asked = run.query_many("ledger", "count", ["a0", "a1", "a4"])
                        told["asked"] = [asked.source, asked.epoch, sorted(asked.values)]
                        measured = run.metrics()
                        told["restored"] = None if measured is None else measured.restored
                    report(epoch=now, placement=driver.placement, repinned=driver.repinned, **told)
                    if now == options.stop_spark_at:
                        spark.stop()
                        report(stopped="spark")
                        time.sleep(60)
    except Exception as failure:
        if failure is not run.error:
            raise
    error = run.error
    report(
        end=run.status,
        error=None if error is None else type(error).__name__,
        text=str(error),
        epoch=epoch_of(run) or None,
    )
    spark.stop()


if __name__ == "__main__":
    main()
