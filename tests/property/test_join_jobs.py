"""Jobs with joins, led by a real coordinator over real slots: attempts fail, slots die, files are
compacted, the parallelism changes, and every pair comes once.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn import Job
from cairn.backends.cached import mapped_rows
from cairn.backends.cached.backend import CachedBackend
from cairn.backends.columnar import row_table, runs
from cairn.backends.redis import backend as redis_backend
from cairn.driver.coordinator import compaction, epoch
from cairn.driver.coordinator.epoch import Coordinator
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Port, SourceNode, Watermark
from cairn.sinks import Collect
from cairn.sinks.base import SinkContext
from cairn.slot import batches
from cairn.storage import manifest
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import SparkPosition
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from cairn.stream import Stream
from cairn.testing import ManualClock
from cairn.types import parse_schema
from cairn.types.codec import codec
from tests.backends import MORE_IN_SOAK, backend_name
from tests.simulation.cluster import Cluster, Trouble

GROUP_COUNT = 8
SCHEMA = parse_schema("k string, ms bigint, id bigint")
REACH_MS = 6
KINDS = ["interval", "ttl", "equi", "as of", "as of, top", "interval, first"]
"""With "top", the newest rows of each key are behind the join, in its level. With "first", rows of
the right side are dropped before it, in its level; those of the left come by a shuffle.
"""

Given = tuple[str, str | None, int]
"""Side, key, time in milliseconds."""
ROWS = st.tuples(
    st.sampled_from(["left", "right"]),
    st.none() | st.sampled_from(["", "a", "a longer key than sixteen", "é"]),
    st.integers(0, 40),
)


class Machine:
    """A job, led again and again over one checkpoint."""

    def __init__(self, kind: str, backend: str, scratch: str) -> None:
        self.kind, self.backend, self.scratch = kind, backend_name(backend), scratch
        self.store = open_store("memory:")
        self.clock = ManualClock()
        self.sinks: list[dict[str, Collect]] = []
        self.batches = 0
        self.rows: dict[str, list[Any]] = {"left": [], "right": []}
        """(key, time, id, the epoch's clock) of every row."""

    def job(self, *, chaining: bool) -> Job:
        job = Job("pairs", max_parallelism=GROUP_COUNT, chaining=chaining)
        is_timed = self.kind not in ("ttl", "equi")
        sides = []
        for name in ("left", "right"):
            time = ("ms", Watermark(3)) if is_timed else (None, None)
            job._nodes[name] = SourceNode(name, None, SCHEMA, *time)  # type: ignore[arg-type]
            sides.append(Stream(job, (Port(name),), SCHEMA))
        left, right = sides
        sinks = {"out": Collect()}
        if self.kind == "interval, first":
            right = right.deduplicate(on="k", within="4 ms", uid="first")
            sinks["first"] = Collect()
            right.sink_to(sinks["first"], uid="f")
        if self.kind.startswith("interval"):
            joined = left.join(right, on="k", within=f"{REACH_MS} ms", how="full", uid="join")
        elif self.kind == "ttl":
            joined = left.join(right, on="k", ttl=f"{REACH_MS} ms", how="full", uid="join")
        elif self.kind == "equi":
            joined = left.join(right, on="k", uid="join")
        else:
            joined = left.join_as_of(right, on="k", how="left", uid="join")
        joined.sink_to(sinks["out"], uid="out")
        if self.kind == "as of, top":
            sinks["top"] = Collect()
            joined.top(2, by=["ms desc", "id"], per="k", uid="top").sink_to(sinks["top"], uid="t")
        for name in ("left", "right") if is_timed else ():
            sinks[name] = Collect()
            joined.side(f"late.{name}").sink_to(sinks[name], uid=name + "-late")
        self.sinks.append(sinks)
        return job

    def lead(self, parallelism: int, trouble: Trouble) -> None:
        # An operator keeps its state when it moves to another level.
        graph = self.job(chaining=parallelism != 3).graph()
        job = create_or_open_job(self.store, graph.name, GROUP_COUNT)
        spec = job_spec(graph, job_id=job.job_id, checkpoint=self.store.url, backend=self.backend)
        sinks: dict[str, Any] = {node.uid: node.sink for node in graph.sinks}
        for uid, sink in sinks.items():
            sink.open(SinkContext(job.job_id, graph.name, uid, pa.schema([])))
        self.coordinator = Coordinator(
            spec,
            self.store,
            sinks,
            parallelism=parallelism,
            retained_epochs=2,
            attempts_max=6,
            clock=self.clock,
            sleep=self.clock.sleep,
            origins=graph.watermarks,
        )
        self.cluster = Cluster(graph, spec, self.store, self.scratch, trouble)
        self.coordinator.take_over()
        self.coordinator.recover()

    def run(self, given: list[Given], *, is_draining: bool = False) -> None:
        rows: dict[str, list[Any]] = {"left": [], "right": []}
        for side, key, time in given:
            rows[side].append((key, time, len(self.rows[side]) + len(rows[side])))
        struct = codec(pa.struct(list(SCHEMA)))
        inputs = {
            side: struct.encode([struct.normalise(row) for row in mine])
            for side, mine in rows.items()
        }
        position = SparkPosition(folder="spark", batch_id=self.batches, offsets="")
        self.batches += 1
        committed = self.coordinator.run_batch(
            position,
            lambda begin: self.cluster.execute(inputs, begin),
            is_draining=is_draining,
        )
        self.coordinator.note_published()
        for side, mine in rows.items():
            self.rows[side] += [(*row, committed.now_ms) for row in mine]

    def out(self) -> Counter[Any]:
        """(key, left id, right id) of everything that was emitted."""
        return Counter((row.k, row.id, row.id_right) for row in self._rows("out"))

    def top(self) -> dict[Any, Any]:
        """Return the id at each key and rank, as the changes leave them."""
        ranks: dict[int, Any] = {}
        for row in self._rows("top"):
            ranks[row.id] = (row.k, row.rank)
        return {at: id_ for id_, at in ranks.items() if at[1] is not None}

    def expected_top(self) -> dict[Any, Any]:
        rows = [row for row in self.rows["left"] if row[2] not in self.late("left")]
        found: dict[Any, Any] = {}
        for key in {row[0] for row in rows}:
            best = sorted((-row[1], row[2]) for row in rows if row[0] == key)[:2]
            found |= {(key, rank): id_ for rank, (_, id_) in enumerate(best, 1)}
        return found

    def late(self, side: str) -> set[int]:
        return {row.id for row in self._rows(side)}

    def _rows(self, sink: str) -> list[Any]:
        # A run also has the newest epoch of the one before.
        epochs: dict[int, list[Any]] = {}
        for sinks in self.sinks:
            epochs |= sinks[sink].epochs if sink in sinks else {}
        return [row for rows in epochs.values() for row in rows]

    def expected(self) -> Counter[Any]:
        """Join all rows that were not late, one by one."""
        left, right = (
            [row for row in self.rows[side] if row[2] not in self.late(side)]
            for side in ("left", "right")
        )
        if self.kind == "interval, first":
            passed = {row.id for row in self._rows("first")}
            right = [row for row in right if row[2] in passed]
        if self.kind in ("as of", "as of, top"):
            return self._as_of(left, right)
        found: Counter[Any] = Counter()
        alone = {("l", row[2]): (row[0], row[2], None) for row in left}
        alone |= {("r", row[2]): (row[0], None, row[2]) for row in right}
        for mine in left:
            for theirs in right:
                if None is not mine[0] == theirs[0] and self._is_near(mine, theirs):
                    found[mine[0], mine[2], theirs[2]] += 1
                    alone.pop(("l", mine[2]), None)
                    alone.pop(("r", theirs[2]), None)
        return found if self.kind == "equi" else found + Counter(alone.values())

    def _is_near(self, mine: Any, theirs: Any) -> bool:
        at = {"interval": 1, "interval, first": 1, "ttl": 3}.get(self.kind)
        return at is None or abs(mine[at] - theirs[at]) <= REACH_MS

    def _as_of(self, left: list[Any], right: list[Any]) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for key, time, number, _ in left:
            known = [row for row in right if None is not key == row[0] and row[1] <= time]
            newest = max((row[1] for row in known), default=None)
            # Versions of one time: any of them, as the order of equal times is Spark's.
            ids = [row[2] for row in known if row[1] == newest]
            chosen = [each for each in ids if self.out()[key, number, each]]
            found[key, number, chosen[0] if chosen else (ids or [None])[0]] += 1
        return found


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    """So that a few epochs are enough for merges, bases, stored deltas and new layouts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FAN_IN", 2)
        # The content of rows does not fit in memory.
        patch.setattr(CachedBackend, "table_bytes_max", 0)
        patch.setattr(mapped_rows, "PAGE_BYTES_MIN", 1)
        patch.setattr(redis_backend, "APPLY_EPOCHS", 1)
        patch.setattr(compaction, "BASE_BYTES_MIN", 6_000)
        patch.setattr(epoch, "INLINE_BYTES_MAX", 2_500)
        patch.setattr(manifest, "FULL_EVERY", 3)
        patch.setattr(row_table, "DEAD_MIN", 2)
        patch.setattr(row_table, "PIECE_ROWS", 3)
        patch.setattr(runs, "PAIRS_MAX", 4)
        patch.setattr(batches, "EMIT_ROWS_MAX", 2)
        patch.setattr(batches, "CALL_ROWS_MAX", 5)
        yield


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data(), trouble=st.sampled_from([0.0, 0.05]), seed=st.integers(0, 1 << 16))
def test_every_pair_comes_once_whoever_dies(
    kind: str, backend: str, data: st.DataObject, trouble: float, seed: int
) -> None:
    rows = st.lists(ROWS, max_size=10)
    leads = st.sampled_from([1, 2, 3, 5, GROUP_COUNT])
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(kind, backend, scratch)
        machine.lead(2, Trouble(random.Random(seed), trouble))
        for step in data.draw(st.lists(rows | rows | leads, min_size=1, max_size=9)):
            if isinstance(step, int):
                machine.lead(step, Trouble(random.Random(seed), trouble))
                continue
            machine.clock.advance_ms(3)
            machine.run(step)
        for _ in range(2):
            machine.run([], is_draining=True)
        assert machine.out() == machine.expected()
        if kind == "as of, top":
            assert machine.top() == machine.expected_top()
        assert verify(machine.store).ok
