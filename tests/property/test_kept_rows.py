"""`latest`, `top` and `deduplicate`, led by a real coordinator over real slots: attempts fail,
slots die, files are compacted, the parallelism changes, and the output is that of a model.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.backends.cached.backend import CachedBackend
from cairn.backends.columnar import table as columns
from cairn.backends.redis import backend as redis_backend
from cairn.driver.coordinator import compaction, epoch
from cairn.functions import BatchProcess
from cairn.operators import latest, top
from cairn.operators.deduplicate import Distinct
from cairn.operators.latest import Latest
from cairn.operators.top import By, Top
from cairn.plan.graph import Graph, Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.sinks import Collect
from cairn.storage import manifest
from cairn.storage.verify import verify
from cairn.types import parse_schema
from tests.backends import MORE_IN_SOAK
from tests.property import test_batch_jobs as jobs
from tests.simulation.cluster import Trouble

ROW = parse_schema("k string, ts bigint, v struct<a:string,b:double>")
ROWS = st.tuples(
    st.none() | st.sampled_from(["", "a", "a longer key than sixteen", "é"]),
    st.integers(0, 20),
    st.tuples(st.none() | st.sampled_from(["", "text", "z" * 30]), st.integers(0, 3)),
)


class Model(Protocol):
    def run(self, rows: list[Any]) -> list[Any]: ...


def order(row: Any) -> Any:
    key, ts, (a, b) = row
    return ((key is not None, key or ""), ts, (a is not None, a or ""), b)


class NewestRows:
    def __init__(self) -> None:
        self.held: dict[Any, Any] = {}

    def run(self, rows: list[Any]) -> list[Any]:
        before = dict(self.held)
        for row in rows:
            held = self.held.get(row[0])
            if held is None or (row[1], order(row)) > (held[1], order(held)):
                self.held[row[0]] = row
        return [row for key, row in self.held.items() if row != before.get(key)]


class TopRows:
    """The two rows with the greatest times; equal rows are told apart by their serial numbers."""

    def __init__(self) -> None:
        self.held: dict[Any, list[tuple[Any, int]]] = {}
        self.serial = 0

    def run(self, rows: list[Any]) -> list[Any]:
        before = {key: list(held) for key, held in self.held.items()}
        for row in rows:
            held = self.held.setdefault(row[0], [])
            held.append((row, self.serial))
            self.serial += 1
            held.sort(key=lambda each: (-each[0][1], order(each[0]), each[1]))
            del held[2:]
        changes: list[Any] = []
        for key, held in self.held.items():
            old = before.get(key, [])
            changes += [
                (*e[0], rank) for rank, e in enumerate(held, 1) if old[rank - 1 : rank] != [e]
            ]
            changes += [(*each[0], None) for each in old if each not in held]
        return changes


class FirstRows:
    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def run(self, rows: list[Any]) -> list[Any]:
        passed = []
        for row in rows:
            if row[0] not in self.seen:
                self.seen.add(row[0])
                passed.append(row)
        return passed


class Case(NamedTuple):
    function: Callable[[], BatchProcess]
    model: Callable[[], Model]
    event_time: str | None
    out: Any


CASES = {
    "latest": Case(lambda: Latest(ROW, None, is_timed=True), NewestRows, "ts", ROW),
    "top": Case(
        lambda: Top(2, [By("ts", True)], ROW, None), TopRows, None, Top(2, [], ROW, None).schema
    ),
    "deduplicate": Case(Distinct, FirstRows, None, ROW),
}


class Machine(jobs.Machine):
    def __init__(self, case: Case, backend: str, scratch: str) -> None:
        super().__init__("k string", backend, scratch)
        self.case = case
        self.schema, self.out = ROW, case.out

    def graph(self, sink: Collect) -> Graph:
        inlet = Inlet((Port("rows"),), ("k",))
        return build_graph(
            "kept",
            jobs.GROUP_COUNT,
            {
                "rows": SourceNode("rows", None, ROW, self.case.event_time, None),
                "op": ProcessNode("op", (inlet,), self.case.function(), self.case.out),
                "out": SinkNode("out", (Port("op"),), sink),
            },
        )


def plain(row: Any) -> Any:
    return tuple(map(plain, row)) if isinstance(row, tuple) else row


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    """So that a few epochs are enough for merges, bases, new layouts and several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FAN_IN", 2)
        # Some of the states do not fit in memory after a few epochs.
        patch.setattr(CachedBackend, "table_bytes_max", 300)
        patch.setattr(redis_backend, "APPLY_EPOCHS", 1)
        patch.setattr(compaction, "BASE_BYTES_MIN", 6_000)
        patch.setattr(epoch, "INLINE_BYTES_MAX", 2_500)
        patch.setattr(manifest, "FULL_EVERY", 3)
        patch.setattr(columns, "DEAD_MIN", 2)
        patch.setattr(columns, "TEXT_BYTES_MIN", 64)
        patch.setattr(latest, "EMIT_ROWS_MAX", 2)
        patch.setattr(top, "PART_ROWS_MAX", 2)
        yield


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@pytest.mark.parametrize("name", CASES)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data(), trouble=st.sampled_from([0.0, 0.05]), seed=st.integers(0, 1 << 16))
def test_output_is_that_of_the_model_whatever_fails(
    name: str, backend: str, data: st.DataObject, trouble: float, seed: int
) -> None:
    rows = st.lists(ROWS, max_size=12)
    leads = st.sampled_from([1, 2, 3, 5, jobs.GROUP_COUNT])
    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(case, backend, scratch)
        machine.lead(2, Trouble(random.Random(seed), trouble))
        model = case.model()
        for step in data.draw(st.lists(rows | rows | leads, min_size=1, max_size=10)):
            if isinstance(step, int):
                machine.lead(step, Trouble(random.Random(seed), trouble))
                continue
            emitted = Counter(map(plain, machine.run_batch(step)))
            assert emitted == Counter(model.run(step))
        if machine.coordinator.newest is not None:
            assert verify(machine.store).ok
