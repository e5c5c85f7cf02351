"""A job as users write it, led epoch by epoch over real slots, with rows given by hand."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn import Job
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.rounds import is_pending
from cairn.plan.deploy import job_spec
from cairn.sinks.base import SinkContext
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.store import open_store
from cairn.testing import ManualClock
from cairn.types.codec import codec
from tests.backends import backend_name
from tests.simulation.cluster import Cluster


def at(second: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=second)


class LedJob:
    def __init__(
        self,
        job: Job,
        scratch: Path,
        parallelism: int = 2,
        *,
        backend: str = "heap",
        **options: Any,
    ) -> None:
        self.graph, self.store, self.clock = job.graph(), open_store("memory:"), ManualClock()
        info = create_or_open_job(self.store, self.graph.name, self.graph.group_count)
        spec = job_spec(
            self.graph, job_id=info.job_id, checkpoint=self.store.url, backend=backend_name(backend)
        )
        sinks: dict[str, Any] = {node.uid: node.sink for node in self.graph.sinks}
        for uid, sink in sinks.items():
            sink.open(SinkContext(info.job_id, self.graph.name, uid, pa.schema([])))
        self.coordinator = Coordinator(
            spec,
            self.store,
            sinks,
            parallelism=parallelism,
            retained_epochs=5,
            **{"attempts_max": 1, **options},
            clock=self.clock,
            sleep=self.clock.sleep,
            origins=self.graph.watermarks,
        )
        self.coordinator.take_over()
        self.coordinator.recover()
        self.cluster = Cluster(self.graph, spec, self.store, str(scratch))
        self.epochs: list[Epoch] = []

    def run(
        self, *, is_draining: bool = False, type_: pa.DataType | None = None, **rows: Any
    ) -> Epoch:
        """An epoch with these rows of the sources, which come as this type if one is given."""
        inputs = {}
        for name, given in rows.items():
            node: Any = self.graph.nodes[name]
            struct = codec(pa.struct(list(node.schema)))
            found = struct.encode([struct.normalise(row) for row in given])
            inputs[name] = found if type_ is None else found.cast(type_)
        position = SparkPosition(folder="spark", batch_id=len(self.epochs), offsets="")
        epoch = self.coordinator.run_batch(
            position,
            lambda begin: self.cluster.execute(inputs, begin),
            is_draining=is_draining,
        )
        self.epochs.append(epoch)
        self.coordinator.note_published()
        return epoch

    def run_out(self) -> None:
        """Until nothing is on its way back."""
        while is_pending(self.coordinator.newest):
            self.run()

    def late_rows(self, uid: str) -> int:
        """Of all epochs."""
        return sum(epoch.metrics.operators[uid].late_rows for epoch in self.epochs)
