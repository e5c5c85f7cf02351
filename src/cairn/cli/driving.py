"""Drive a run from the command line: show its epochs, and end it on Ctrl-C.

Always true here:
- every epoch the run commits is shown once, in order, however fast they come;
- the first Ctrl-C (or SIGTERM) lets the current epoch finish; the second does not;
- with --json only JSON goes to stdout: output of the job, its sinks and Spark goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from cairn.cli.failure import INTERRUPTED
from cairn.cli.job_file import build_job, load_build, parse_conf, pickle_by_value_in_spark
from cairn.cli.spark_log import spark_log, stderr_to
from cairn.driver import progress
from cairn.driver.options import Options
from cairn.logs import configure_from_environment
from cairn.report.epoch import EpochReport
from cairn.report.text import JsonView, LineView, LiveView, View
from cairn.storage.store import open_store

if TYPE_CHECKING:
    from cairn.run import Run

POLL_S = 0.1


@dataclass(frozen=True)
class Settings:
    """The command line of `cairn run`."""

    target: str
    options: Options
    args: list[str] = field(default_factory=list)
    master: str | None = None
    conf: list[str] = field(default_factory=list)
    as_json: bool = False


def drive(settings: Settings) -> None:
    """Run the job until it ends, is stopped, or fails."""
    from cairn.session import session

    configure_from_environment()
    conf = parse_conf(settings.conf, settings.master)
    module, build = load_build(settings.target, settings.args)
    out = _json_only_stdout() if settings.as_json else None
    is_live = out is None and sys.stdout.isatty()
    name = Path(settings.target.rpartition(":")[0]).stem
    log = spark_log() if is_live else None
    if log is None:
        spark = session(name, **conf)
    else:
        with Console().status("starting Spark …"), stderr_to(log):
            spark = session(name, **conf)
    pickle_by_value_in_spark(module)
    try:
        # Nothing else may write to the terminal of a live view.
        with _Interrupts() as interrupts, progress.mute(if_=is_live):
            job = build_job(build, spark, settings.target, settings.args)
            store = open_store(settings.options.checkpoint)
            view = _view(settings, job.name, store.url, out, is_live=is_live)
            interrupts.view = view
            with view:
                with job.start(**vars(replace(settings.options, checkpoint=store.url))) as run:
                    if run.url is not None:
                        # With --json, stdout has nothing but JSON.
                        print(f"dashboard: {run.url}", file=sys.stderr if out else sys.stdout)
                    _follow(run, _Follower(run), view, interrupts)
                view.end(run.status)
    except Exception as error:
        if log is not None:
            error.add_note(f"spark's log: {log}")
        raise
    finally:
        with contextlib.suppress(Exception):
            spark.stop()


def _follow(run: Run, follower: _Follower, view: View, interrupts: _Interrupts) -> None:
    stopped, paused = False, False
    try:
        while not run.wait(POLL_S):
            for epoch in follower.new():
                view.epoch(epoch)
            why = run.paused
            if (why is not None) != paused:
                paused = not paused
                view.say(f"paused: {why}" if paused else "the sink is back: continuing")
            if interrupts.count and not stopped:
                stopped = True
                run.stop()
    finally:
        for epoch in follower.new():
            view.epoch(epoch)


class _Follower:
    """The epochs a run commits, each once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._shown = 0

    def new(self) -> Iterator[EpochReport]:
        """Yield the epochs committed since the last call, oldest first."""
        for epoch in self._run.history():
            if epoch.epoch > self._shown:
                self._shown = epoch.epoch
                yield epoch


class _Interrupts:
    """Counts Ctrl-C and SIGTERM: the first stops the run, the second ends the process at once."""

    def __init__(self) -> None:
        self.count = 0
        self.view: View | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            if self.view is not None:
                self.view.abandon()
            # The JVM ends with this process, and the slots with the JVM. The epoch is lost.
            os._exit(INTERRUPTED)
        if self.view is not None:
            self.view.say("stopping after the current epoch; Ctrl-C again stops at once")


def _view(
    settings: Settings, job_name: str, url: str, out: TextIO | None, *, is_live: bool
) -> View:
    if out is not None:
        return JsonView(out)
    if is_live:
        return LiveView(Console(), job_name, url, settings.options.trigger)
    return LineView(sys.stdout, job_name, url)


def _json_only_stdout() -> TextIO:
    """Return the real stdout, and send everything else that is printed to stderr."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out
