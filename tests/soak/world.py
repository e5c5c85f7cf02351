"""A job that runs while things are done to it, until time is up; then everything is counted.

Always true here:
- a driver that is gone is replaced, whatever ended it;
- one that ends by itself is a failure of the test, unless a server was away while it ran;
- nothing is done to a job before it has committed an epoch again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, Takeover
from cairn.storage.store import open_store
from tests import servers
from tests.soak.chain import Chain
from tests.soak.driver import Driver
from tests.soak.reader import Readers
from tests.soak.schedule import Disturbance
from tests.soak.targets import Site, targets

BACKLOG_MAX = 4
"""Batches that wait for the job; no more are made then."""
PATIENCE_S = 120.0


class World:
    """One job, its drivers, its readers, and who disturbs them."""

    def __init__(
        self, site: Site, names: Sequence[str], seed: int, say: Callable[[str], None] = print
    ) -> None:
        self.chain = Chain(site, names, seed)
        self.site = site
        self.targets = targets(site, list(names))
        self.readers = Readers(self.targets)
        self.done: Counter[str] = Counter()
        self.epochs = 0
        self._say = say
        self._driver: Driver | None = None
        self._server_was_away = False
        self._feeding = threading.Event()

    # The job

    @property
    def driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    def start(self, *arguments: str) -> None:
        self._server_was_away = False
        self._driver = self.chain.drive("--trigger", "0 seconds", *arguments)
        self.done["drivers"] += 1

    def leave(self) -> None:
        """Done with this driver; whatever is left of it is ended."""
        self.epochs += self.driver.epochs
        self.driver.__exit__()

    def replace(self, *arguments: str) -> None:
        self.leave()
        self.start(*arguments)

    def await_progress(self) -> None:
        """Until an epoch more is committed, by this driver or by one that takes its place."""
        enough, deadline = self.driver.epochs + 1, time.monotonic() + PATIENCE_S
        while True:
            if self.driver.await_epochs(enough, PATIENCE_S):
                return
            if self.driver.lives:
                raise AssertionError(f"no epoch in {PATIENCE_S:.0f} s\n{self.driver.errors()}")
            ended = self.driver.find(end=...) or {}
            if not self._server_was_away:
                raise AssertionError(f"a driver ended by itself: {ended}\n{self.driver.errors()}")
            assert time.monotonic() < deadline, f"no driver gets on: {ended}"
            self._say(f"       the driver has ended: {str(ended.get('text'))[:100]}")
            self.done["drivers that gave up"] += 1
            self.replace()
            enough = 1

    def _feed(self) -> None:
        watch = self.readers.watches[0]
        while not self._feeding.is_set():
            if self.chain.events.batches - max(watch.sizes, default=0) < BACKLOG_MAX:
                self.chain.events.add()
            self._feeding.wait(0.1)

    # What is done to it

    def disturb(self, what: Disturbance) -> None:
        kind, detail = what.kind, what.detail.split()
        if kind == "kill driver":
            self.driver.kill(with_jvm=False)
            self.replace()
        elif kind == "kill driver and JVM":
            self.driver.kill()
            self.replace()
        elif kind == "kill driver at":
            self.driver.kill()
            self.replace("--at", f"{detail[0]}=kill")
            # It dies once it comes by; a sink without rows may not.
            self.driver.await_epochs(8, PATIENCE_S / 2)
            self.done["died at a point"] += self.driver.was_killed or not self.driver.lives
            self.driver.kill()
            self.replace()
        elif kind in ("kill slot", "hang slot"):
            self._hurt_slot(kind, detail)
        elif kind == "rescale":
            self.driver.tell(f"rescale {detail[0]}")
        else:
            self._server_was_away = True
            self._outage(kind, float(detail[1]))
        self.done[kind] += 1

    def _hurt_slot(self, kind: str, detail: list[str]) -> None:
        slots = sorted(self.driver.slots().values())
        if not slots:
            return
        pid = slots[int(detail[0]) % len(slots)]
        with contextlib.suppress(ProcessLookupError):
            if kind == "kill slot":
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGSTOP)
            time.sleep(float(detail[2]))
            os.kill(pid, signal.SIGCONT)

    def _outage(self, kind: str, seconds: float) -> None:
        if kind == "stop postgres":
            server = servers.postgres()
            server.stop()
            time.sleep(seconds)
            server.start()
            return
        pid = servers.redis().pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    # From beginning to end

    def run(self, plan: Sequence[Disturbance], seconds: float, batches_min: int = 0) -> None:
        """For so long, or longer: until a reader has seen so many batches come."""
        feeder = threading.Thread(target=self._feed, daemon=True)
        self.chain.events.add(2)
        started = time.monotonic()
        self.start()
        try:
            with self.readers:
                feeder.start()
                for what in plan:
                    self.await_progress()
                    seen = max(self.readers.watches[0].sizes, default=0)
                    left = seconds - (time.monotonic() - started)
                    if left <= what.after_s and seen >= batches_min:
                        time.sleep(max(0.0, left))
                        break
                    time.sleep(what.after_s)
                    at = time.monotonic() - started
                    self._say(f"{at:6.1f} s  {seen:5d} batches visible   {what.kind} {what.detail}")
                    self.disturb(what)
                    assert not self.readers.problems, self.readers.problems
                self._feeding.set()
                feeder.join()
                self.driver.kill()
                self.leave()
                self.chain.finish()
        finally:
            self._feeding.set()
            self.driver.kill()
        assert not self.readers.problems, self.readers.problems

    def result(self) -> dict[str, Any]:
        """What was done, and what went in and came out."""
        events = self.chain.events
        records = list(Log(open_store(str(self.site.checkpoint))).records())
        out = {}
        for name, target in self.targets.items():
            rows = target.rows()
            rows = list(set(rows)) if target.may_repeat else rows
            out[name] = {
                "rows": sum(r.n for r in rows) if target.is_keyed else len(rows),
                "sum": sum(r.total if target.is_keyed else r.amount for r in rows),
            }
        return {
            "in": {"rows": len(events.all), "sum": sum(event.amount for event in events.all)},
            "out": out,
            "batches": events.batches,
            "records_in_log": {
                "epochs": sum(isinstance(r, Epoch) for r in records),
                "takeovers": sum(isinstance(r, Takeover) for r in records),
            },
            "done": dict(sorted(self.done.items())),
            "readers": {
                w.name: {"polls": w.polls, "refused": w.refused, "moments": len(w.sizes)}
                for w in self.readers.watches
            },
        }
