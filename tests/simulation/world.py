"""A checkpoint, the drivers that lead a job on it one after the other, and what they publish.

A `Driver` does what `cairn.run.Run` does, step by step, with Spark's streaming query
played by `FakeSpark`; the coordinator, the log, rewinding, retention and the slots are the
real ones. `World` outlives every driver and checks the promises:

- published output is that of exactly the committed input, each row once;
- stored state is the model's after exactly the committed input;
- no epoch number ever means two things, and `now` and the watermark never go back;
- `verify` finds no damage.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.crash import crash_point
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.guarantees import Guarantee
from cairn.driver.coordinator.rewind import give_up, settle
from cairn.driver.coordinator.ticker import is_due, is_idleness_due
from cairn.driver.spark_batches import SparkBatches
from cairn.driver.spark_place import SparkPlace
from cairn.errors import CairnError
from cairn.plan.deploy import job_spec
from cairn.sinks import Files
from cairn.sinks.base import Committable, Execution, Sink, SinkContext, Writer
from cairn.state import List, Map
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.published import note_published
from cairn.storage.seen_files import DEFAULT_INTERVAL
from cairn.storage.source_files import in_order
from cairn.storage.spark_log import read_offsets
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from cairn.testing import Fault, FaultyStore, ManualClock, SimulatedCrash
from cairn.types.durations import MIN_MS
from tests.restored import held_contents, restored_operator
from tests.simulation.cluster import Cluster, Trouble
from tests.simulation.ledger import Model, Row, as_arrow, ledger_graph, rows_of


class Transactional(Sink):
    """A sink over a memory store: an epoch's rows and its mark are one object."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self.store: Store = open_store(self.url)

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        return _StagedRows(
            self.store, f"{epoch:012d}-{subtask}-{execution.batch}-{execution.round}"
        )

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        mark = f"published/{epoch:012d}-{batch}"
        if self.store.exists(mark):
            return
        rows = [
            row
            for committable in committables
            for row in json.loads(self.store.get(f"staged/{committable['name']}"))
        ]
        self.store.put(mark, json.dumps(rows).encode())

    def newest_mark(self) -> int | None:
        marks = [found.path.split("/")[1] for found in self.store.list("published/")]
        return max((int(mark.split("-")[0]) for mark in marks), default=None)

    def recover(self, before_epoch: int) -> None:
        for found in self.store.list("staged/"):
            if int(found.path.split("/")[1].split("-")[0]) < before_epoch:
                self.store.delete([found.path])


class _StagedRows(Writer):
    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._rows: list[Any] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += [list(row.values()) for row in batch.to_pylist()]

    def prepare(self) -> Committable | None:
        if not self._rows:
            return None
        data = json.dumps(self._rows, default=str).encode()
        name = f"{self._prefix}-{hashlib.blake2b(data, digest_size=8).hexdigest()}"
        self._store.put(f"staged/{name}", data)
        return {"name": name}

    def abort(self) -> None:
        self._rows.clear()


class ConcurrentQueryError(Exception):
    """What Spark raises when two queries write the same folder."""


class FakeSpark:
    """A streaming query over files as far as its folder shows.

    A batch is an entry of the list of files, then its offsets, and in the end its commit. What
    was read before is known by the list alone, as a file source knows it.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self.store = store
        self.folder = folder
        store.put_if_absent(f"{folder}/metadata", b'{"id":"a query"}')

    def next_batch(self, rows_max: int) -> tuple[int, int, int]:
        """(batch, first row, row after the last): the one under way, else a new one."""
        offsets = self._numbers("offsets")
        last = max(offsets, default=-1)
        if last >= 0 and last not in self._numbers("commits"):
            first = self._end(last - 1) if last - 1 in offsets else 0
            return last, first, self._end(last)
        start = self._end(last) if last >= 0 else 0
        entry = self._add_files(start, start + rows_max)
        end = {"logOffset": entry, "rows": start + rows_max}
        text = f'v1\n{{"batchTimestampMs":{last}}}\n{json.dumps(end)}'
        self._put(f"offsets/{last + 1}", text)
        return last + 1, start, start + rows_max

    def _add_files(self, start: int, stop: int) -> int:
        """Add an entry to the list of files seen, which must go up to here; its number."""
        root = f"{self.folder}/sources/0"
        files = {name: self.store.get(f"{root}/{name}").decode() for name in self._names(root)}
        names = in_order(files)
        last = int(names[-1].split(".")[0]) if names else -1
        lines = [line for name in names for line in files[name].split("\n")[1:]]
        seen = [json.loads(line)["path"] for line in lines]
        assert seen == sorted(set(seen)) and (seen[-1:] == [f"{start:06d}"]) == (start > 0), (
            f"Spark would read files again: {start}, {seen}, {names}"
        )
        if start == stop:
            return last
        entry = last + 1
        lines = lines if is_compact(entry) else []
        lines.append(json.dumps({"path": f"{stop:06d}", "timestamp": 1, "batchId": entry}))
        name = f"{entry}.compact" if is_compact(entry) else f"{entry}"
        self._put(f"sources/0/{name}", "\n".join(["v1", *lines]))
        return entry

    def _put(self, name: str, text: str) -> None:
        if not self.store.put_if_absent(f"{self.folder}/{name}", text.encode()):
            raise ConcurrentQueryError(name)

    def _names(self, root: str) -> list[str]:
        return [found.path.rsplit("/", 1)[1] for found in self.store.list(root)]

    def commit(self, batch_id: int) -> None:
        self.store.put(f"{self.folder}/commits/{batch_id}", b'v1\n{"nextBatchWatermarkMs":0}')

    def _end(self, batch_id: int) -> int:
        return end_of(read_offsets(self.store, self.folder, batch_id))

    def _numbers(self, kind: str) -> set[int]:
        return {int(name) for name in self._names(f"{self.folder}/{kind}")}


def is_compact(entry: int) -> bool:
    """As Spark does: every tenth entry holds all before it."""
    return (entry + 1) % DEFAULT_INTERVAL == 0


def end_of(offsets: str) -> int:
    """The row after the last one that a batch with these offsets reads."""
    return int(json.loads(offsets.split("\n")[2])["rows"])


# What ends a driver. Anything else is a mistake of ours and fails the test.
DEATHS = (SimulatedCrash, CairnError, OSError, ConcurrentQueryError)


class SteppedClock(ManualClock):
    """A machine's clock, which somebody may set."""

    def step_ms(self, by_ms: int) -> None:
        """Set it ahead or back."""
        self._now_ms += by_ms


class World:
    """What is there whoever leads: the store, the input, the outside world."""

    def __init__(
        self,
        seed: int,
        folder: Any,
        *,
        group_count: int = 8,
        backend: str = "heap",
        is_on_driver: bool = False,
    ) -> None:
        """`is_on_driver`: Spark's folder is on the disk of each driver, and goes with it."""
        self.is_on_driver = is_on_driver
        self.seed = seed
        self.backend = backend
        self.random = random.Random(seed)
        self.folder = folder
        self.store = open_store("memory:")
        self.clock = SteppedClock(1_000_000)
        self.published = open_store("memory:")
        self.files = str(folder / "branched")
        self.group_count = group_count
        self._nonces: dict[int, str] = {}
        self._seen = _Published()
        self._branched = _Published()
        self._input: list[Row] = []
        self._model = Model()

    def graph(self) -> Any:
        return ledger_graph(self.group_count, Transactional(self.published.url), Files(self.files))

    def newest(self) -> Epoch | None:
        return Log(self.store).newest_epoch()

    def rest(self) -> None:
        """The job is quiet for a while, so its driver notes that the newest epoch is published."""
        newest = self.newest()
        assert newest is not None
        note_published(self.store, newest.number, newest.nonce)

    def committed_rows(self) -> int:
        newest = self.newest()
        return 0 if newest is None else end_of(newest.spark.offsets)

    def model(self, row_count: int) -> Model:
        """The model after so many rows; committed input only grows."""
        rows = self._rows(row_count)
        for row in rows[self._model.rows :]:
            self._model.process(row)
        assert self._model.rows == row_count, "an epoch was lost"
        return self._model

    def arrow(self, start: int, stop: int) -> pa.StructArray:
        """A stretch of the input."""
        return as_arrow(self.rows(start, stop))

    def inputs(self, start: int, stop: int) -> dict[str, pa.StructArray]:
        """A stretch of the input, by source."""
        return {"rows": self.arrow(start, stop)}

    def rows(self, start: int, stop: int) -> list[Row]:
        return self._rows(stop)[start:]

    def _rows(self, count: int) -> list[Row]:
        if len(self._input) < count:
            self._input = rows_of(self.seed, 2 * count)
        return self._input[:count]

    # What the outside sees

    def seen(self) -> Counter[tuple[Any, ...]]:
        paths = [each.path for each in self.published.list("published/")]
        return self._seen.read(paths, lambda path: json.loads(self.published.get(path)))

    def branched(self) -> Counter[tuple[Any, ...]]:
        """By the plain files of the folder; the lists must name the same ones."""
        store = open_store(self.files)
        plain = [each.path for each in store.list() if not each.path.startswith("_")]
        listed = [
            file["name"]
            for each in store.list("_cairn")
            if "/epochs/" in each.path
            for file in json.loads(store.get(each.path))["files"]
        ]
        assert sorted(listed) == plain, "the lists name other files than the folder holds"
        return self._branched.read(plain, lambda path: _rows_of(store.local_path(path)))

    # The promises

    def check_output(self) -> None:
        """When everything committed is published, which is so after a start and after a batch."""
        model = self.model(self.committed_rows())
        assert self.seen() == model.seen
        assert self.branched() == model.branched

    def check_log(self) -> None:
        """No number means two things; `now` and the watermark do not go back."""
        now_ms = 0
        watermark_ms = MIN_MS
        for record in Log(self.store).records():
            known = self._nonces.setdefault(record.number, record.nonce)
            assert known == record.nonce, f"record {record.number} was written twice"
            if isinstance(record, Epoch):
                assert record.now_ms >= now_ms, f"now went back in epoch {record.number}"
                now_ms = record.now_ms
                if record.watermark_ms is not None:
                    assert record.watermark_ms >= watermark_ms, f"of epoch {record.number}"
                    watermark_ms = record.watermark_ms

    def check_all(self) -> None:
        self.check_output()
        self.check_log()
        report = verify(self.store)
        assert report.ok, report.damage
        self.check_state()

    def check_state(self) -> None:
        newest = self.newest()
        if newest is not None:
            stored = stored_state(self.store, self.graph(), newest)
            assert stored == self.model(self.committed_rows()).state()


class _Published:
    """The rows of all published objects. They never change, so each is read once."""

    def __init__(self) -> None:
        self._rows: Counter[tuple[Any, ...]] = Counter()
        self._paths: set[str] = set()

    def read(self, paths: list[str], read: Callable[[str], Any]) -> Counter[tuple[Any, ...]]:
        assert self._paths <= set(paths), "what was published is gone"
        for path in set(paths) - self._paths:
            self._rows.update(map(tuple, read(path)))
        self._paths = set(paths)
        return self._rows


def _rows_of(file: str | None) -> list[Any]:
    columns = pq.read_table(file).to_pydict().values()
    return list(zip(*columns, strict=True))


def stored_state(store: Store, graph: Any, epoch: Epoch) -> dict[str, dict[Any, dict[str, Any]]]:
    """What a fresh slot that owns everything restores, as plain values by operator and key."""
    spec = job_spec(graph, job_id="", checkpoint=store.url, backend="heap")
    found: dict[str, dict[Any, dict[str, Any]]] = {}
    for operator_spec in (op for level in spec.levels for op in level.operators):
        operator = restored_operator(operator_spec, store, epoch.number, graph.group_count)
        keys: dict[Any, dict[str, Any]] = {}
        for name, table in operator.tables.items():
            for key, value in held_contents(table).items():
                keys.setdefault(key, {})[name] = _plain(table, value)
        found[operator_spec.uid] = keys
    return found


def _plain(table: Any, value: Any) -> Any:
    restored = table.values.restore
    if isinstance(table.declaration, List):
        return [restored(item) for item in value]
    if isinstance(table.declaration, Map):
        return {entry: None if v is None else restored(v) for entry, v in value.items()}
    return restored(value)


class Driver:
    """One driver, from its takeover on. It dies by being forgotten."""

    def __init__(
        self,
        world: World,
        *,
        parallelism: int = 2,
        faults: Iterable[Fault] = (),
        fault_rate: float = 0.0,
        trouble: float = 0.0,
        retained_epochs: int = 3,
        guarantee: Guarantee = "exactly-once",
        checkpoint_every: int = 1,
    ) -> None:
        self.world = world
        self.guarantee = guarantee
        chance = random.Random(world.random.random())
        self.store = FaultyStore(
            world.store, faults, seed=chance.randrange(1 << 30), fault_rate=fault_rate
        )
        graph = world.graph()
        job = create_or_open_job(self.store, graph.name, graph.group_count)
        spec = job_spec(graph, job_id=job.job_id, checkpoint=world.store.url, backend=world.backend)
        for sink in graph.sinks:
            schema = graph.schema(sink.inputs[0])
            sink.sink.open(
                SinkContext(job.job_id, graph.name, sink.uid, schema, checkpoint=world.store.url)
            )
            if isinstance(sink.sink, Transactional):
                sink.sink.store = FaultyStore(
                    sink.sink.store, seed=chance.randrange(1 << 30), fault_rate=fault_rate
                )
        self.coordinator = Coordinator(
            spec,
            self.store,
            {sink.uid: sink.sink for sink in graph.sinks},
            parallelism=parallelism,
            retained_epochs=retained_epochs,
            clock=world.clock,
            sleep=world.clock.sleep,
            origins=graph.watermarks,
            guarantee=guarantee,
            checkpoint_every=checkpoint_every,
        )
        self.coordinator.log._sleep = world.clock.sleep
        self.cluster = Cluster(graph, spec, self.store, str(world.folder), Trouble(chance, trouble))
        self.folder = ""

    def start(self) -> None:
        newest = self.coordinator.take_over()
        term = self.coordinator.term
        place = SparkPlace(self.store)
        if self.world.is_on_driver:
            place = SparkPlace(open_store("memory:"), kept=self.store)
        if self.guarantee == "at-most-once":
            position = give_up(
                newest,
                term,
                store=self.store,
                target=place.store,
                sources=["rows"],
                since=self.coordinator.log.last_restore() or 0,
            )
        else:
            position = settle(newest, term, store=self.store, target=place.store, sources=["rows"])
        self.folder = position.folder
        crash_point("driver.rewind.laid")
        self.coordinator.recover()
        # Not through the faulty store: Spark's files carry no checksum that would show a tear.
        if not self.world.is_on_driver:
            place = SparkPlace(self.world.store)
        self.spark = FakeSpark(place.store, self.folder)
        self.batches = SparkBatches(
            self.coordinator,
            place,
            position,
            ["rows"],
            gives_up=self.guarantee == "at-most-once",
        )

    def rescale(self, parallelism: int) -> None:
        """As `Run.rescale`: from the next epoch on."""
        self.coordinator.commit_epoch()
        self.coordinator.subtasks.rescale(parallelism)
        crash_point("driver.deployed")

    def cut_ranges(self) -> None:
        """As `Run.rebalance`, with ranges at random: from the next epoch on."""
        self.coordinator.commit_epoch()
        groups = range(1, self.coordinator.spec.group_count)
        inner = self.world.random.sample(groups, self.coordinator.parallelism - 1)
        self.coordinator.subtasks.starts = (0, *sorted(inner)) if inner else ()
        crash_point("driver.deployed")

    def run_batch(self, rows_max: int = 10) -> None:
        batch_id, start, stop = self.spark.next_batch(rows_max)
        position = self.batches.to_run(batch_id)
        if position is not None:
            inputs = self.world.inputs(start, stop)
            self.coordinator.run_batch(position, lambda begin: self.cluster.execute(inputs, begin))
        crash_point("driver.epoch.ended")
        self.spark.commit(batch_id)

    def run_idle(self, *, is_draining: bool = False) -> bool:
        """As `Run` does when Spark is silent; whether there was something to do."""
        newest = self.coordinator.newest
        now_ms = self.coordinator.now_ms()
        origins, awake_ms = self.coordinator.origins, self.coordinator.awake_ms
        if newest is None or not (
            is_draining
            or is_due(newest, now_ms)
            or is_idleness_due(newest, origins, now_ms, awake_ms)
        ):
            return False
        self._run_without_a_batch(newest.spark, is_draining)
        return True

    def run_changed(self) -> None:
        """As `Run` does when a change was asked for and Spark is silent."""
        if self.coordinator.newest is not None:
            self._run_without_a_batch(self.coordinator.newest.spark, is_draining=False)

    def _run_without_a_batch(self, position: SparkPosition, is_draining: bool) -> None:
        crash_point("driver.idle.due")
        self.coordinator.run_batch(
            position,
            lambda begin: self.cluster.execute({}, begin),
            is_draining=is_draining,
            has_rows=False,
        )
        crash_point("driver.idle.ended")
