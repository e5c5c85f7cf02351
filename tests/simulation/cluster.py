"""The slots of one run in this process, and the routing between levels that Spark would do.

Everything inside a slot is real (`slot.runtime.Runtime`, loaded from the pickled job); what
is played here is Spark: which rows go to which subtask, tasks that fail or run twice, and
slots that die. What goes wrong in an attempt is decided by `Trouble`, from a seed. A slot may be
on a `Host` of its own, which sees another checkpoint or has another wall clock.

Always true here:
- rows of a key reach a level in the order in which they left the one before;
- a level that runs twice must acknowledge the same, or the simulation fails.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cairn.crash import crash_point
from cairn.driver.coordinator.rounds import Outcome
from cairn.errors import EpochError
from cairn.key_groups import Starts, key_hasher, starts_within, subtask_of
from cairn.plan.deploy import incoming
from cairn.plan.graph import Edge, Graph, Level, Port
from cairn.process_identity import ProcessIdentity, identify
from cairn.protocol.envelope import Envelope
from cairn.protocol.messages import (
    Ack,
    Begin,
    Report,
    Slice,
    Token,
    ack_encoder,
    report_decoder,
)
from cairn.protocol.parts import read_part
from cairn.protocol.spec import JobSpec
from cairn.slot.level import LevelRuntime, StaleTokenError
from cairn.slot.runtime import Runtime
from cairn.storage.store import NotFoundError, Store
from cairn.testing import SimulatedCrash
from cairn.types.codec import codec

BATCH_ROWS = 7


@dataclass
class Trouble:
    """What may go wrong while an attempt runs, each with this chance per subtask and level."""

    random: random.Random
    chance: float = 0.0

    def strikes(self) -> bool:
        return self.random.random() < self.chance


@dataclass
class Host:
    """A machine that a slot is on."""

    checkpoint: Store | None
    """The store at the path of the checkpoint; None if there is none."""
    clock_step_s: float = 0.0
    """By how much its wall clock was set since the slot started."""

    def open(self, url: str) -> Store:
        if self.checkpoint is None:
            raise NotFoundError(url)
        return self.checkpoint

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Whatever reads the wall clock inside reads this machine's."""
        if not self.clock_step_s:
            yield
            return
        now_s, now_ns, boot_s = time.time, time.time_ns, psutil.boot_time()
        step_s = self.clock_step_s
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: now_s() + step_s)
            patch.setattr(time, "time_ns", lambda: now_ns() + int(step_s * 1e9))
            # The kernel computes it from the wall clock, and start times are computed from it.
            patch.setattr(psutil._pslinux, "boot_time", lambda: boot_s + step_s)
            yield


class Cluster:
    """One run's slots. A slot that is not there is started when it is needed."""

    def __init__(
        self,
        graph: Graph,
        spec: JobSpec,
        store: Store,
        scratch: str,
        trouble: Trouble | None = None,
    ) -> None:
        self.graph = graph
        self.store = store
        self.scratch = scratch
        self.trouble = trouble or Trouble(random.Random(0))
        self.slots: dict[int, Runtime] = {}
        self.hosts: dict[int, Host] = {}
        """Hosts of slots that are not on a machine like the driver's."""
        self._executors: dict[int, ProcessIdentity] = {}
        self.spec_id, self._spec = spec.pickle()
        self._task_attempts = itertools.count()

    def host(self, number: int) -> Host:
        return self.hosts.get(number) or Host(self.store)

    def slot(self, number: int, token: Token | None = None) -> Runtime:
        if number not in self.slots:
            host = self.host(number)
            runtime = Runtime(scratch=self.scratch, open_url=host.open, threaded=False)
            runtime.load(self.spec_id, self._spec, token)
            self.slots[number] = runtime
            self._executors[number] = identify()
        return self.slots[number]

    def watch(self) -> None:
        """Every slot looks whether its executor is there, and ends if it is not."""
        for number in list(self.slots):
            with self.host(number).clock():
                if not self._executors[number].is_alive:
                    self.kill(number)

    def kill(self, number: int) -> None:
        """As by SIGKILL: nothing is closed, nothing is aborted."""
        self.slots.pop(number, None)

    def execute(self, sources: Mapping[str, pa.StructArray], begin: Begin) -> Outcome:
        """One round of an attempt; one without a slice of the batch has no input."""
        sources = {
            name: rows.slice(*_stretch(len(rows), begin.slice))
            for name, rows in sources.items()
            if begin.slice is not None
        }
        lanes: dict[int, list[pa.StructArray]] = {
            edge.index: [sources[port.node] for port in edge.inputs if port.node in sources]
            for edge in self.graph.edges
        }
        acks: list[Ack] = []
        reports: list[Report] = []
        self.watch()
        starts = self._starts(begin)
        for level in self.graph.levels:
            feeds = self._feeds(level, lanes, begin.parallelism, starts)
            for subtask in range(begin.parallelism):
                with self.host(begin.slot(subtask)).clock():
                    ack, emitted = self._run_subtask(level, subtask, feeds[subtask], begin)
                acks.append(ack)
                if self.trouble.strikes():
                    acks.append(ack)
                for lane, rows in emitted:
                    lanes[lane].append(rows)
                reports += self._report(level, begin.slot(subtask))
        return Outcome(acks, reports, self._latest_times(sources))

    def _latest_times(self, sources: Mapping[str, pa.StructArray]) -> dict[str, int]:
        """As Spark observes them: per origin that gave rows, the latest event time."""
        found: dict[str, int] = {}
        for name, node in self.graph.time_origins.items():
            for port in self.graph.bare((Port(name),)):
                if port.node in sources and node.event_time is not None:
                    latest = pc.max(_micros(sources[port.node].field(node.event_time))).as_py()
                    if latest is not None:
                        found[name] = max(latest, found.get(name, latest))
        return found

    def _report(self, level: Level, number: int) -> list[Report]:
        """What the slot tells beside its acknowledgement, if it still lives."""
        slot = self.slots.get(number)
        if slot is None:
            return []
        # What is written in the background comes to its end at some epoch or other.
        if self.trouble.random.random() < 0.5:
            try:
                slot.compactor.work()
            except SimulatedCrash as crash:
                if not crash.point.startswith("slot."):
                    raise
                self.kill(number)
                return []
        found = slot.level(level.index)
        report = found.report(found._newest, executor="", log="", started_ms=0)
        return [report_decoder.decode(msgspec.msgpack.encode(report))]

    # Routing

    def _starts(self, begin: Begin) -> Starts:
        """The ranges of the execution: as Spark's plan has them."""
        owned = [read_part(begin, at, self.store).groups for at in range(begin.parallelism)]
        return tuple(each[0] for each in owned if each is not None)

    def _feeds(
        self,
        level: Level,
        lanes: dict[int, list[pa.StructArray]],
        parallelism: int,
        starts: Starts,
    ) -> list[list[pa.RecordBatch]]:
        """The batches of each subtask."""
        feeds: list[list[pa.RecordBatch]] = [[] for _ in range(parallelism)]
        # Rows of a broadcast come before all others.
        for edge in sorted(level.edges, key=lambda edge: edge.way != "broadcast"):
            parts = lanes.pop(edge.index)
            if not parts:
                continue
            rows = _in_time(edge, pa.concat_arrays(parts))
            groups, subtasks = self._places(edge, rows, parallelism, starts)
            for subtask in range(parallelism):
                is_mine = (subtasks == subtask) | (edge.way == "broadcast")
                mine = np.flatnonzero(is_mine)
                for start in range(0, len(mine), BATCH_ROWS):
                    at = mine[start : start + BATCH_ROWS]
                    feeds[subtask].append(_batch(level, edge, groups[at], rows.take(pa.array(at))))
        return feeds

    def _places(
        self, edge: Edge, rows: pa.StructArray, parallelism: int, starts: Starts
    ) -> tuple[Any, Any]:
        if not edge.keys:
            at = np.arange(len(rows), dtype=np.int32)
            return np.zeros(len(rows), np.int32), at % min(
                edge.parallelism or parallelism, parallelism
            )
        types = [edge.schema.field(name).type for name in edge.keys]
        hash_key = key_hasher(types)
        columns = [
            codec(type).decode_keys(rows.field(edge.schema.names.index(name)))
            for name, type in zip(edge.keys, types, strict=True)
        ]
        count = self.graph.group_count
        groups = [hash_key(key) % count for key in zip(*columns, strict=True)]
        starts = starts_within(edge.parallelism, parallelism, count, starts)
        subtasks = [subtask_of(group, parallelism, count, starts) for group in groups]
        return np.array(groups, np.int32), np.array(subtasks, np.int32)

    # A subtask, and what may happen to it

    def _run_subtask(
        self, level: Level, subtask: int, batches: Sequence[pa.RecordBatch], begin: Begin
    ) -> tuple[Ack, list[tuple[int, pa.StructArray]]]:
        trouble = self.trouble
        if trouble.strikes():
            self.kill(begin.slot(subtask))
        try:
            if trouble.strikes():
                self._zombie(level, subtask, batches, begin)
            ack, emitted = self._attempt(level, subtask, batches, begin)
            if trouble.strikes():
                # Spark runs the stage again, here or on another executor.
                if trouble.random.random() < 0.5:
                    self.kill(begin.slot(subtask))
                again, emitted = self._attempt(level, subtask, batches, begin)
                assert ack_encoder.encode(again) == ack_encoder.encode(ack), "a rerun differs"
        except SimulatedCrash as crash:
            if not crash.point.startswith("slot."):
                raise
            self.kill(begin.slot(subtask))
            raise EpochError(f"the slot of subtask {subtask} is gone") from crash
        if trouble.strikes():
            self.kill(begin.slot(subtask))
        return ack, emitted

    def _attempt(
        self, level: Level, subtask: int, batches: Sequence[pa.RecordBatch], begin: Begin
    ) -> tuple[Ack, list[tuple[int, pa.StructArray]]]:
        emitted: list[tuple[int, pa.StructArray]] = []
        runtime, token = self._begin(level, subtask, begin)
        runtime.attach(token, lambda batch: emitted.append(_opened(runtime.spec.outgoing, batch)))
        for batch in batches:
            runtime.run(token, batch)
            if self.trouble.strikes():
                runtime.abandon(token)
                raise EpochError(f"the task of subtask {subtask} failed")
        ack = runtime.finish(token)
        crash_point("slot.acknowledged")
        return ack, emitted

    def _begin(self, level: Level, subtask: int, begin: Begin) -> tuple[LevelRuntime, Token]:
        token = begin.token(next(self._task_attempts))
        runtime = self.slot(begin.slot(subtask), token).level(level.index)
        runtime.begin(token, begin, subtask)
        return runtime, token

    def _zombie(
        self, level: Level, subtask: int, batches: Sequence[pa.RecordBatch], begin: Begin
    ) -> None:
        """A task that Spark has given up, still at work while the next one begins."""
        runtime, old = self._begin(level, subtask, begin)
        runtime.attach(old, lambda batch: None)
        for batch in batches[:1]:
            runtime.run(old, batch)
        self._begin(level, subtask, begin)
        for batch in batches[:1]:
            with pytest.raises(StaleTokenError):
                runtime.run(old, batch)
        with pytest.raises(StaleTokenError):
            runtime.finish(old)
        runtime.abandon(old)


def _stretch(count: int, slice: Slice) -> tuple[int, int]:
    """The first row of a slice, and their number."""
    size = -(-count // slice.count)
    return min(slice.index * size, count), size


def _batch(level: Level, edge: Edge, groups: Any, rows: pa.StructArray) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "group": pa.array(groups, pa.int32()),
        "lane": pa.array(np.full(len(rows), edge.index, np.int32)),
    }
    envelope = incoming(level)
    fields = dict(zip(envelope.names[edge.index], rows.flatten(), strict=True))
    for name, type_ in envelope.columns.items():
        columns[name] = fields.get(name, pa.nulls(len(rows), type_))
    if any(other.event_time for other in level.edges):
        columns["time"] = _times(edge, rows)
    return pa.RecordBatch.from_pydict(columns)


def _times(edge: Edge, rows: pa.StructArray) -> pa.Array:
    if edge.event_time is None:
        return pa.nulls(len(rows), pa.int64())
    return pc.add(_micros(rows.field(edge.event_time)), edge.shift_us)


def _micros(times: pa.Array) -> pa.Array:
    if pa.types.is_integer(times.type):
        return pc.multiply(times, 1000)
    return times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())


def _in_time(edge: Edge, rows: pa.StructArray) -> pa.StructArray:
    """As Spark sorts them, but for ties."""
    if edge.event_time is None:
        return rows
    return rows.take(pc.array_sort_indices(_times(edge, rows), null_placement="at_start"))


def _opened(envelope: Envelope, batch: pa.RecordBatch) -> tuple[int, pa.StructArray]:
    lane = batch["lane"][0].as_py() if envelope.has_lanes else envelope.lanes[0][0]
    return lane, envelope.open(batch, lane)
