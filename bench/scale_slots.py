"""A job of any size without Spark, slots or state: what its driver sees, for `scale.py`.

The graph, the messages and the manifests are real. A slot is a function that acknowledges the next
delta of each operator; its files have sizes and names, but no bytes.

Always true here:
- the age of ranges is spread evenly, as in a job that has run for days: each epoch merges the
  files of about one range in nine, and writes a few bases;
- the same seed gives the same files.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable
from typing import Any

import msgspec

from cairn import KeyedProcess, sinks, state
from cairn.driver.coordinator.compaction import BASE_RATIO, FAN_IN
from cairn.driver.coordinator.epoch import Coordinator
from cairn.key_groups import groups_of
from cairn.plan.graph import Graph, Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.protocol.messages import (
    Ack,
    Begin,
    Compacted,
    Compaction,
    OperatorAck,
    Part,
    Report,
    ack_encoder,
)
from cairn.slot.heat import BUCKETS_MAX
from cairn.storage.files import StateFile
from cairn.storage.manifest import Epoch, EpochOperator, FileRef, Held, RangeState, SparkPosition
from cairn.storage.pack import state_path
from cairn.storage.store import NotFoundError, Store, StoredObject
from cairn.types import parse_schema

ROW = parse_schema("k long, v double")
CHANGED_SHARE = 1e-4
"""Share of the state's bytes that an epoch writes as deltas."""
ROW_BYTES = 100
TIERS = 2
"""Tiers of merged deltas in a range, beside the deltas of the last epochs."""


class Total(KeyedProcess[Any]):
    total = state.Value("double", default=0.0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.total.set(self.total.get() + row.v)
        return row.k, self.total.get()


def chain_graph(operators: int, group_count: int) -> Graph:
    """Return a chain of operators, each behind a shuffle by key."""
    nodes: dict[str, Any] = {"rows": SourceNode("rows", None, ROW, None, None)}
    before = "rows"
    for index in range(operators):
        uid = f"total-{index}"
        nodes[uid] = ProcessNode(uid, (Inlet((Port(before),), ("k",)),), Total(), ROW, ())
        before = uid
    nodes["out"] = SinkNode("out", (Port(before),), sinks.Noop())
    return build_graph("scale", group_count, nodes)


class SizesStore(Store):
    """Objects in memory; of a slot's file only the path. Counts requests by kind."""

    def __init__(self) -> None:
        self.url = "memory:scale"
        self.objects: dict[str, bytes] = {}
        self.requests: collections.Counter[str] = collections.Counter()
        self.put_bytes = 0

    def add_files(self, paths: Iterable[str]) -> None:
        """Note the files that slots have put."""
        for path in paths:
            self.objects[path] = b""
            self.requests["slot put"] += 1

    def get(self, path: str) -> bytes:
        self.requests["get"] += 1
        if path not in self.objects:
            raise NotFoundError(path)
        return self.objects[path]

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        return self.get(path)[offset : offset + length]

    def put(self, path: str, data: bytes) -> None:
        self.requests["put"] += 1
        self.put_bytes += len(data)
        self.objects[path] = data

    def put_file(self, path: str, local_file: str) -> None:
        raise NotImplementedError("slots put no files here")

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if path in self.objects:
            self.requests["put"] += 1
            return False
        self.put(path, data)
        return True

    def move(self, src: str, dst: str) -> None:
        self.objects[dst] = self.objects.pop(src)

    def delete(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        # A bucket deletes a thousand in one request.
        self.requests["delete"] += -(-len(paths) // 1000)
        for path in paths:
            self.objects.pop(path, None)

    def list(self, prefix: str = "") -> list[StoredObject]:
        found = sorted(path for path in self.objects if path.startswith(f"{prefix}/"))
        self.requests["list"] += 1 + len(found) // 1000
        return [StoredObject(path, len(self.objects[path]), 0.0) for path in found]

    def exists(self, path: str) -> bool:
        self.requests["get"] += 1
        return path in self.objects

    def local_path(self, path: str) -> str | None:
        return None


class Slots:
    """All slots of a job: acknowledges epochs as encoded messages."""

    def __init__(self, coordinator: Coordinator, store: SizesStore, state_bytes: int, seed: int):
        self._coordinator = coordinator
        self._store = store
        self._random = random.Random(seed)
        operators = len(coordinator.scoped_states)
        self._base_bytes = state_bytes // max(1, operators * coordinator.parallelism)
        self._delta_bytes = max(1, int(self._base_bytes * CHANGED_SHARE))
        self._announced: dict[tuple[int, int], Compacted] = {}

    def _new_file(self, kind: Any, length: int, term: int) -> StateFile:
        id = f"{self._random.getrandbits(128):032x}"
        return StateFile(
            id, kind, length, max(1, length // ROW_BYTES), path=state_path(term, f"{id}.{kind}")
        )

    def first_epoch(self, number: int) -> Epoch:
        """Return an epoch of an old job: bases, and deltas of all ages after them."""
        coordinator = self._coordinator
        operators = {
            uid: EpochOperator(
                uid=uid,
                function_version=coordinator.operators[uid].function_version,
                key_types=scoped.key_types,
                states=scoped.decls,
                parallelism=coordinator.parallelism,
                ranges=[self._old_range(subtask) for subtask in range(coordinator.parallelism)],
            )
            for uid, scoped in coordinator.scoped_states.items()
        }
        epoch = Epoch(
            number=number,
            parent=None,
            term=coordinator.term,
            nonce="0",
            wall_ms=0,
            now_ms=0,
            watermarks={},
            spark=SparkPosition(folder="", batch_id=-1, offsets=""),
            operators=operators,
        )
        ranges = [part for each in operators.values() for part in each.ranges]
        self._store.add_files(file.path for part in ranges for file in part.files)
        return epoch

    def _old_range(self, subtask: int) -> RangeState:
        coordinator = self._coordinator
        groups = groups_of(subtask, coordinator.parallelism, coordinator.spec.group_count)
        files = [(0, "base", self._base_bytes)]
        # One merged delta as large as the deltas of a long time: a base is due at random.
        old_bytes = int(self._random.random() * BASE_RATIO["heap"] * self._base_bytes)
        files.append((TIERS + 3, "delta", old_bytes))
        for tier in range(TIERS, -1, -1):
            size = self._delta_bytes * FAN_IN**tier
            files += [(tier, "delta", size)] * self._random.randrange(FAN_IN - 1)
        listed: list[FileRef] = []
        for tier, kind, length in files:
            file = self._new_file(kind, length, coordinator.term)
            listed.append(file.list_for(groups, first_epoch=0, last_epoch=0, tier=tier))
        rows = self._base_bytes // ROW_BYTES
        return RangeState(
            first_group=groups.start,
            group_count=len(groups),
            version=f"{self._random.getrandbits(128):032x}",
            files=listed,
            state_keys=rows,
            state_entries=rows,
            state_bytes=self._base_bytes,
        )

    def answer(self, begin: Begin, parts: dict[int, Part]) -> tuple[list[bytes], list[bytes]]:
        """Return the acknowledgements and reports of all subtasks, encoded."""
        acks, reports = [], []
        new: list[str] = []
        for level in self._coordinator.spec.levels:
            uid = level.operators[0].uid
            for subtask, part in parts.items():
                delta = self._new_file("delta", self._delta_bytes, begin.term)
                new.append(str(delta.path))
                acked = OperatorAck(uid, delta.rows, delta.rows, delta.rows, delta)
                acks.append(ack_encoder.encode(Ack(level.index, subtask, [acked], {})))
                report = self._report(level.index, uid, subtask, begin)
                reports.append(msgspec.msgpack.encode(report))
                # A slot has one file under way until the driver confirms it.
                if uid in part.compactions and not report.compacted:
                    done = self._compact(uid, subtask, part.compactions[uid], begin)
                    new.append(str(done.stored.path))
                    self._announced[level.index, subtask] = done
        self._store.add_files(new)
        return acks, reports

    def _report(self, level: int, uid: str, subtask: int, begin: Begin) -> Report:
        done = self._announced.pop((level, subtask), None)
        rows = self._base_bytes // ROW_BYTES
        return Report(
            level=level,
            subtask=subtask,
            executor=f"10.0.{subtask // 16 // 250}.{subtask // 16 % 250}",
            log=f"/tmp/cairn/{begin.run_id}/{subtask}/log",
            started_ms=begin.now_ms,
            finished_ms=begin.now_ms + 1000,
            begin_ms=1.5,
            restored=False,
            process_ms=900.5,
            snapshot_ms=90.5,
            compacted=() if done is None else (done,),
            state_held={uid: Held(rows, rows)},
            stage=level,
            door=f"10.0.{subtask // 16 // 250}.{subtask // 16 % 250}:40000",
            epoch=begin.epoch,
            execution=begin.execution,
            group_rows={uid: (subtask * BUCKETS_MAX // begin.parallelism, [rows])},
            hot_keys={uid: [(f"{subtask}", 100)]},
        )

    def _compact(self, uid: str, subtask: int, order: Compaction, begin: Begin) -> Compacted:
        newest = self._coordinator.newest
        assert newest is not None and begin.parent is not None, "an old job has epochs"
        range_ = newest.operators[uid].ranges[subtask]
        files = range_.files[-order.count :]
        is_base = order.kind == "base"
        length = self._base_bytes if is_base else sum(file.length for file in files)
        return Compacted(
            uid=uid,
            first_group=range_.first_group,
            group_count=range_.group_count,
            kind=order.kind,
            tier=order.tier,
            as_of=begin.parent,
            replaced=() if is_base else tuple(file.listing for file in files),
            stored=self._new_file("base" if is_base else "delta", length, begin.term),
            ms=100.0,
        )
