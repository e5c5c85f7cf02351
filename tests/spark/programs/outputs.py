"""The driver program of the tests about sinks: one keyed operator into many kinds of targets.

    python -m tests.spark.programs.outputs <folder> --targets files,postgres [--at WHERE]

WHERE is POINT[@TARGET][:NTH]=kill|stop: at the nth pass of a crash point, while that target's
sink commits, the process kills or stops itself. Lines on its input: "rescale N", "stop".
Reports in lines of JSON: {"run": id} when it has started, {"epoch": n} as epochs are
committed, {"status": …} when that changes, {"at": point} before it stops itself,
{"end": status, "error": …} last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from typing import Any

from cairn import Job, KeyedProcess, crash, state
from cairn.sinks.base import Sink
from tests.soak.events import IN, OUT
from tests.soak.targets import Site, Target, targets
from tests.spark.support import Input, epoch_of


class Account(KeyedProcess[Any]):
    """Count and sum per account; every row out."""

    n = state.Value("bigint", default=0)
    total = state.Value("bigint", default=0)

    def __init__(self, die_after: int | None = None, mark: str = "") -> None:
        """`die_after`: the slot that has had so many rows dies, unless `mark` is a file by then."""
        self.rows_left = die_after
        self.mark = mark

    def process(self, row: Any, ctx: Any) -> Any:
        if self.rows_left is not None:
            self._count_down()
        self.n.set(self.n.get() + 1)
        self.total.set(self.total.get() + row.amount)
        return (*row, self.n.get(), self.total.get())

    def _count_down(self) -> None:
        assert self.rows_left is not None
        self.rows_left -= 1
        if self.rows_left == 0:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)


def build(spark: Any, site: Site, into: dict[str, Target], function: Any = None) -> Job:
    job = Job("outputs", max_parallelism=16)
    rows = job.source("events", Input(site.path / "in", IN).stream(spark))
    out = rows.key_by("account").process(function or Account(), schema=OUT, uid="account")
    for name, target in into.items():
        out.sink_to(target.sink(), uid=name)
    return job


class At:
    """Acts at one pass of a crash point, in this process."""

    def __init__(self, where: str) -> None:
        where, _, self.action = where.partition("=")
        where, _, nth = where.partition(":")
        self.point, _, self.target = where.partition("@")
        self.passes_left = int(nth or 1)
        self._committing = ""
        assert self.point in crash.POINTS and self.action in ("kill", "stop")

    def arm(self, into: dict[str, Target]) -> None:
        # On the classes: objects go to the slots, where nothing of this may happen.
        for kind in {type(target.sink()) for target in into.values()}:
            self._watch(kind)
        crash._told = self.told

    def _watch(self, kind: type[Sink]) -> None:
        commit = kind.commit

        def watched(sink: Sink, *arguments: Any, **more: Any) -> None:
            self._committing = sink.context.uid
            self.passed("driver.sink.begun")
            commit(sink, *arguments, **more)

        kind.commit = watched  # type: ignore[method-assign, assignment]

    def told(self, point: str) -> None:
        # The coordinator says that one begins before it is known which.
        if point != "driver.sink.begun":
            self.passed(point)

    def passed(self, point: str) -> None:
        if point != self.point or self.target not in ("", self._committing):
            return
        self.passes_left -= 1
        if self.passes_left == 0:
            report(at=point)
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def report(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def obey(run: Any) -> None:
    for line in sys.stdin:
        command, *arguments = line.split()
        # The run may have ended meanwhile.
        with contextlib.suppress(Exception):
            if command == "rescale":
                run.rescale(int(arguments[0]))
            elif command == "stop":
                run.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--targets", required=True)
    parser.add_argument("--at", default=None)
    parser.add_argument("--parallelism", type=int, default=None)
    parser.add_argument("--trigger", default="available-now")
    parser.add_argument("--start", default="{}", help="more options of job.start, as JSON")
    options = parser.parse_args()

    import cairn

    site = Site.load(options.folder)
    into = targets(site, options.targets.split(","))
    if options.at:
        At(options.at).arm(into)
    spark = cairn.session("outputs", master="local[2]", ui__enabled=False)
    run = None
    error: BaseException | None = None
    try:
        run = build(spark, site, into).start(
            checkpoint=str(site.checkpoint),
            parallelism=options.parallelism,
            trigger=options.trigger,
            **json.loads(options.start),
        )
        report(run=run._engine.coordinator.run_id)
        threading.Thread(target=obey, args=(run,), daemon=True).start()
        watch(run)
        error = run.error
    except Exception as failure:
        error = failure
    report(
        end="failed" if run is None else run.status,
        error=None if error is None else type(error).__name__,
        text=str(error),
    )
    spark.stop()


def watch(run: Any) -> None:
    newest, status = 0, "running"
    while not run._engine.ended.wait(0.02):
        now = epoch_of(run)
        if now != newest:
            newest = now
            report(epoch=now)
        if run.status != status:
            status = run.status
            report(status=status)
    now = epoch_of(run)
    if now != newest:
        report(epoch=now)


if __name__ == "__main__":
    main()
