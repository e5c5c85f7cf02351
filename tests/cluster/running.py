"""A run of `ledger` on the cluster, fed one file at a time, with its checkpoint in the bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tests.cluster.cluster import Cluster
from tests.spark.programs.ledger import SCHEMA, payments
from tests.spark.support import Input, Program, eventually

FILES = 20 if os.environ.get("CAIRN_SOAK") else 12
"""Tests that take long need more of them, for executors to come and go meanwhile."""
SLOT_BYTES_MAX = 200 << 20
"""Of a slot's own memory; the state of these runs is small."""


class Running:
    """A program on the cluster, fed one file at a time."""

    def __init__(self, cluster: Cluster, program: Program, source: Input) -> None:
        self.cluster = cluster
        self.program = program
        self.source = source
        self.files = payments(FILES)
        self.newest: dict[str, Any] = {}
        """The report of the newest epoch."""

    def feed(self) -> list[str]:
        """One more file; the placement of the subtasks in its epoch, as host:pid."""
        self.source.add(*self.files[self.source.count])
        self.newest = self.program.await_report(epoch=1 + self.source.count)
        return list(self.newest["placement"].values())

    def feed_until(self, holds: Callable[[set[str]], bool]) -> bool:
        """Feed files until the hosts of the subtasks are as wanted; whether they came to be so."""
        while self.source.count < FILES:
            if holds({place.partition(":")[0] for place in self.feed()}):
                return True
            time.sleep(1)
        return False

    def feed_rest(self) -> None:
        while self.source.count < FILES:
            self.feed()

    def processes(self) -> list[psutil.Process]:
        """Return the processes on hosts of workers that are there because of a run."""
        of_host = ("org.apache.spark.deploy.worker.Worker", "sleep 3600")
        everybody = {p.pid: p for host in self.cluster.workers for p in host.processes()}
        for host in self.cluster.workers:
            for mark in of_host:
                for process in host.running(mark):
                    everybody.pop(process.pid, None)
        return list(everybody.values())

    def slots(self) -> list[psutil.Process]:
        return [slot for host in self.cluster.workers for slot in self.cluster.slots(host)]


@contextmanager
def running(
    cluster: Cluster,
    expected: Any,
    name: str,
    *arguments: Any,
    parallelism: int = 2,
    ends_with: int | None = None,
    trap: str = "",
    **conf: Any,
) -> Iterator[Running]:
    """A run of `ledger`; at the end its output and state are those of an undisturbed run.

    `ends_with`: its subtasks at the end, if that is not `parallelism`.
    """
    work = cluster.folder / name
    source = Input(work / "in", SCHEMA)
    url = f"{cluster.s3.url}/{name}"
    fixed = ("--trigger", "0 seconds", "--parallelism", parallelism, "--checkpoint", url)
    with (
        cluster.s3.in_environment(),
        cluster.program(
            "ledger",
            source.folder,
            work,
            *fixed,
            *arguments,
            environment={"TRAP": trap},
            **conf,
        ) as program,
    ):
        program.await_report()
        run = Running(cluster, program, source)
        yield run
        run.feed_rest()
        left = parallelism if ends_with is None else ends_with
        assert eventually(lambda: len(run.slots()) == left), "copies that moved have ended"
        used = [slot.memory_full_info().uss for slot in run.slots()]
        assert max(used) < SLOT_BYTES_MAX, f"a slot has more than its state: {used}"
        cluster.interrupt(program)
        program.end()
        expected.check(work, url)
    assert eventually(lambda: not run.slots()), "no slot outlives the run"
    assert eventually(lambda: not run.processes(), within_s=60), f"left: {run.processes()}"
