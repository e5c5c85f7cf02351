"""A coordinator that leads one level of slots, with Spark played and a sink that keeps count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.rounds import Outcome
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Watermark
from cairn.protocol.messages import Begin
from cairn.sinks import Collect
from cairn.sinks.base import Committable, SinkContext
from cairn.slot.runtime import Runtime
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import SparkPosition
from cairn.storage.store import open_store
from cairn.testing import FaultyStore, ManualClock
from tests.unit.slot.one_level import OUT, Count, count_graph, group_of, run

POSITION = SparkPosition(folder="spark/1", batch_id=0, offsets="v1")


class Recorder(Collect):
    """Says when it is called; fails as often as told."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.failures = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_published": {}, "calls": [], "failures": 0}

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        self.calls.append(("commit", epoch) if batch == 0 else ("commit", epoch, batch))
        if self.failures:
            self.failures -= 1
            raise OSError("sink is away")
        super().commit(epoch, committables, batch)

    def recover(self, before_epoch: int) -> None:
        self.calls.append(("recover", before_epoch))


class Lead:
    """A coordinator with one slot per subtask."""

    def __init__(
        self,
        scratch: Path,
        store: Any = None,
        parallelism: int = 1,
        origins: dict[str, Watermark] | None = None,
        **options: Any,
    ) -> None:
        self.store = store or FaultyStore(open_store("memory:"))
        self.clock = ManualClock(1000)
        self.sink = Recorder()
        graph = count_graph(Count())
        job = create_or_open_job(self.store, graph.name, graph.group_count)
        self.spec = job_spec(graph, job_id=job.job_id, checkpoint=self.store.url, backend="heap")
        self.sink.open(SinkContext(job.job_id, graph.name, "out", OUT))
        self.coordinator = Coordinator(
            self.spec,
            self.store,
            {"out": self.sink},
            parallelism=parallelism,
            retained_epochs=3,
            clock=self.clock,
            sleep=self.clock.sleep,
            origins=origins,
            **options,
        )
        self.begins: list[Begin] = []
        self.scratch = scratch
        self.slots: dict[int, Any] = {}

    def start(self) -> Lead:
        self.coordinator.take_over()
        self.coordinator.recover()
        return self

    def execute(self, begin: Begin, rows: Sequence[tuple[int, int | None]] = ()) -> Outcome:
        self.begins.append(begin)
        acks, reports = [], []
        for subtask in range(begin.parallelism):
            slot = begin.slot(subtask)
            if slot not in self.slots:
                runtime = Runtime(scratch=str(self.scratch), store=self.store, threaded=False)
                runtime.load(*self.spec.pickle())
                self.slots[slot] = runtime
            level = self.slots[slot].level(0)
            mine = [r for r in rows if group_of(r[0]) * begin.parallelism // 6 == subtask]
            acks.append(run(level, begin, mine, subtask=subtask))
            level.compactor.work()
            reports.append(level.report(level._newest, executor="", log="", started_ms=0))
        return Outcome(acks, reports)

    def run_batch(self, *rows: tuple[int, int | None]) -> Any:
        return self.coordinator.run_batch(POSITION, lambda begin: self.execute(begin, rows))


def run_counting(lead: Lead, *users: dict[str, Any], rows: Any = ((1, 5),)) -> Any:
    """An epoch whose subtasks report that functions have counted this."""

    def execute(begin: Begin) -> Outcome:
        outcome = lead.execute(begin, rows)
        reports = [
            msgspec.structs.replace(report, user=user)
            for report, user in zip(outcome.reports, users, strict=False)
        ]
        return outcome._replace(reports=reports)

    return lead.coordinator.run_batch(POSITION, execute)
