"""The forwarder: the function Spark runs for each subtask, between Spark and the slot.

It finds or starts the slot, begins the execution, sends the rows of this level to the slot and
yields the slot's output. Rows for later levels, and acknowledgements of earlier ones, bypass the
slot.

Always true here:
- input is written and output is read on two threads, with a bounded queue between: one thread
  doing both would deadlock when the output is larger than the transport's window;
- the subtask is the number of the partition, because each level is shuffled by subtask into as many
  partitions as there are subtasks and nothing joins or splits them; a row whose key group belongs
  to another subtask fails the task;
- it holds no state: any worker can forward any epoch.
"""

from __future__ import annotations

import functools
import gc
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

from cairn.key_groups import Starts, groups_of
from cairn.protocol.envelope import ACK, LANE, Envelope
from cairn.protocol.messages import Begin, Failure, begin_decoder, pack_failure
from cairn.protocol.parts import for_subtask
from cairn.slot.process import SlotHome, executor_process
from cairn.slot.server import DONE, ENDED, FAILED, LOAD_FIRST, Call, Loaded
from cairn.version import VERSION

BEGIN_PROPERTY = "cairn.begin"
QUEUE_BATCHES = 8
SLOTS_TRIED_MAX = 3


@functools.cache
def _spare_collector() -> None:
    """Exclude all loaded modules from garbage collection, once per worker.

    Spark makes workers collect after every task, and the next task waits for it: 40 ms, nearly
    all of it for the modules of pyarrow, pandas and Spark.
    """
    gc.freeze()


class SubtaskError(RuntimeError):
    """A subtask failed; the text carries a packed Failure through Spark to the driver."""


@dataclass(eq=False, repr=False)
class Forward:
    """For `mapInArrow`: batches of a level's input in, batches of its output out."""

    _clients: ClassVar[dict[str, flight.FlightClient]] = {}

    run_id: str
    level: int
    lanes: tuple[int, ...]
    """The lanes that the level consumes. Those of its input that are not here pass it."""
    incoming: Envelope
    outgoing: Envelope
    group_count: int | None
    """The number of key groups, if all rows of the level have one."""
    spec_id: str
    spec: bytes
    reports: Any
    version: str = VERSION
    """The driver's version of cairn."""
    starts: Starts = ()
    """The first key group of each subtask; empty: equal ranges. Here, and not in the begin
    message: Spark sends it once per executor, and the message with every task."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        self.check_version()
        task = TaskContext.get()
        assert task is not None, "forwarders run in Spark tasks"
        text = task.getLocalProperty(BEGIN_PROPERTY)
        assert text is not None, "the driver sets the begin message"
        begin = begin_decoder.decode(text)
        subtask = task.partitionId()
        home = SlotHome(self.run_id, executor_process(), begin.slot(subtask))
        token = begin.token(task.taskAttemptId())
        call = Call(token, self.spec_id, self.level, subtask, stage=task.stageId())
        try:
            groups = None
            if self.group_count is not None:
                groups = groups_of(subtask, begin.parallelism, self.group_count, self.starts)
            client = self._begin(home, call, begin)
            if begin.follows:
                # Spark wants its input read to the end: the pin table, at most.
                for _ in batches:
                    pass
                return
            yield from self._forward(client, call, groups, batches)
        except flight.FlightError as error:
            text = f"the slot of subtask {subtask} is gone: {_short_text(error)}"
            if excess := home.excess:
                # The kernel has killed it, most likely. Logs show the first line only.
                used, _, advice = excess.partition("\n")
                text = f"the slot of subtask {subtask} is gone. It {used}\n{advice}"
            facts = {"subtask": subtask, "log": str(home.log), "executor": home.executor_label}
            lost = Failure("EpochError", text, {**facts, "is_full": bool(excess)})
            raise SubtaskError(pack_failure(lost)) from error
        finally:
            _spare_collector()

    def read_ahead(self, begin: Begin, subtask: int, place: str | None) -> bool:
        """Have the slot of a subtask here follow an epoch. False if it works here: at `place`."""
        from pyspark import TaskContext

        home = SlotHome(self.run_id, executor_process(), begin.slot(subtask))
        if home.executor_label == place:
            return False
        task = TaskContext.get()
        assert task is not None, "slots are called from Spark tasks"
        token = begin.token(task.taskAttemptId())
        self._begin(home, Call(token, self.spec_id, self.level, subtask), begin)
        return True

    def check_version(self) -> None:
        """Raise a SubtaskError on an executor with another cairn, which came after the start."""
        if self.version != VERSION:
            message = (
                f"driver and executors differ: the driver runs cairn {self.version}, "
                f"the executor on {os.uname().nodename} runs cairn {VERSION}\n"
                "  next: install the driver's version on every host"
            )
            raise SubtaskError(pack_failure(Failure("PlanError", message, {})))

    def _begin(self, home: SlotHome, call: Call, begin: Begin) -> flight.FlightClient:
        body = msgspec.msgpack.encode(
            Call(
                call.token, call.spec_id, call.level, call.subtask, for_subtask(begin, call.subtask)
            )
        )
        for _ in range(SLOTS_TRIED_MAX):
            client = self._connect(home)
            answer = self._act(client, "begin", body)
            if answer == LOAD_FIRST:
                loaded = Loaded(call.token, self.spec_id, self.spec)
                answer = self._act(client, "load", msgspec.msgpack.encode(loaded))
                if answer != ENDED:
                    answer = self._act(client, "begin", body)
            if answer != ENDED:
                return client
            # It has just been ended, so the next look finds none and starts another.
        raise RuntimeError(
            f"slot {home.slot} was ended {SLOTS_TRIED_MAX} times before it could begin"
        )

    def _connect(self, home: SlotHome) -> flight.FlightClient:
        # A worker runs many tasks, and keeps its connection while the slot lives.
        location = (home.find() or home.start()).location
        client = self._clients.get(location)
        if client is None:
            client = self._clients[location] = flight.connect(location)
        return client

    def _act(self, client: flight.FlightClient, kind: str, body: bytes) -> bytes:
        (result,) = client.do_action(flight.Action(kind, body))
        answer: bytes = result.body.to_pybytes()
        if answer[:1] == FAILED:
            raise _failure_of(answer)
        return answer

    def _forward(
        self,
        client: flight.FlightClient,
        call: Call,
        groups: range | None,
        batches: Iterator[pa.RecordBatch],
    ) -> Iterator[pa.RecordBatch]:
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(msgspec.msgpack.encode(call))
        )
        works = [
            lambda out: self._read(reader, out),
            lambda out: self._write(writer, groups, batches, out),
        ]
        output = _Output(works)
        try:
            yield from output.items()
        finally:
            output.stop()
            if not output.is_complete:
                reader.cancel()

    def _write(
        self,
        writer: flight.FlightStreamWriter,
        groups: range | None,
        batches: Iterator[pa.RecordBatch],
        out: _Output,
    ) -> None:
        """Send rows of this level to the slot, and the others directly to the output."""
        batch = next(batches, None)
        names = [] if batch is None else [name for name in batch.schema.names if name != ACK]
        schema = pa.schema([]) if batch is None else batch.select(names).schema
        _send(lambda: writer.begin(schema))
        while batch is not None and not out.is_stopped:
            mine, passing = self._split(batch)
            for each in passing:
                out.put(each)
            if mine.num_rows:
                if groups is not None:
                    _check_groups(mine["group"], groups)
                rows = mine.select(names)
                _send(lambda rows=rows: writer.write_batch(rows))  # type: ignore[misc]
            batch = next(batches, None)
        _send(writer.done_writing)

    def _read(self, reader: flight.FlightStreamReader, out: _Output) -> None:
        """Put batches of the slot into the output, and its report into the accumulator."""
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            if chunk.app_metadata is not None and chunk.app_metadata.size:
                message = chunk.app_metadata.to_pybytes()
                if message[:1] == FAILED:
                    raise _failure_of(message)
                self.reports.add([message[len(DONE) :]])
            if chunk.data is not None:
                out.put(chunk.data)

    def _split(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[pa.RecordBatch]]:
        """Return rows for the slot, and output that bypasses it."""
        if "group" in batch.schema.names and batch["group"].null_count:
            # A row of the pin table that found no row of the epoch.
            batch = batch.filter(batch["group"].is_valid())
        passing = []
        if ACK in batch.schema.names and batch[ACK].null_count < batch.num_rows:
            is_ack = batch[ACK].is_valid()
            passing.append(self.outgoing.pack_acks(batch[ACK].filter(is_ack)))
            batch = batch.filter(pc.invert(is_ack))
        for lane, _ in self.incoming.lanes:
            if lane not in self.lanes:
                theirs = batch.filter(pc.equal(batch[LANE], lane))
                if theirs.num_rows:
                    rows = pa.RecordBatch.from_struct_array(self.incoming.open(theirs, lane))
                    passing.append(self.outgoing.pack(lane, rows))
        if len(self.lanes) < len(self.incoming.lanes):
            batch = batch.filter(pc.is_in(batch[LANE], pa.array(self.lanes, pa.int32())))
        return batch, passing


def _send(call: Callable[[], None]) -> None:
    """Write to the slot; FlightError if it has ended the stream: the reader may get the reason."""
    try:
        call()
    except OSError as error:
        raise flight.FlightUnavailableError(str(error)) from error


def _check_groups(found: pa.Array, groups: range) -> None:
    """Raise SubtaskError if a row's key group is not one of the subtask's."""
    limits = pc.min_max(found).as_py()
    if limits["min"] not in groups or limits["max"] not in groups:
        text = (
            f"rows of key groups {limits['min']} to {limits['max']} came to a subtask that owns "
            f"{groups.start} to {groups.stop - 1}; the epoch runs again"
        )
        raise SubtaskError(pack_failure(Failure("EpochError", text, {})))


class _Output:
    """A bounded queue of batches, filled by threads: one per work."""

    def __init__(self, works: Sequence[Callable[[_Output], None]]) -> None:
        self._queue: queue.Queue[pa.RecordBatch | BaseException | None] = queue.Queue(QUEUE_BATCHES)
        self._stopped = threading.Event()
        self._running = len(works)
        self._errors: list[BaseException] = []
        for work in works:
            threading.Thread(target=self._run, args=(work,), daemon=True).start()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def is_complete(self) -> bool:
        """True if all threads have ended without an error."""
        return not self._running and not self._errors

    def put(self, item: pa.RecordBatch | BaseException | None) -> None:
        while not self.is_stopped:
            try:
                self._queue.put(item, timeout=0.5)
                return
            except queue.Full:
                continue

    def stop(self) -> None:
        self._stopped.set()

    def _run(self, work: Callable[[_Output], None]) -> None:
        try:
            work(self)
            self.put(None)
        except BaseException as error:
            self.put(error)

    def items(self) -> Iterator[pa.RecordBatch]:
        """Yield batches until all threads have ended; raise their error."""
        while self._running:
            item = self._queue.get()
            if isinstance(item, pa.RecordBatch):
                yield item
                continue
            self._running -= 1
            if item is not None:
                self._errors.append(item)
                # The other thread may wait for input that will not come, from the slot or
                # from Spark. If the slot is lost, both threads fail.
                if not isinstance(item, flight.FlightError):
                    break
        if self._errors:
            raise next((e for e in self._errors if isinstance(e, SubtaskError)), self._errors[0])


def _short_text(error: flight.FlightError) -> str:
    """Return the error without the debug context of the transport."""
    return str(error).partition(" gRPC client debug context:")[0].splitlines()[0][:300]


def _failure_of(answer: bytes) -> SubtaskError:
    failure = msgspec.msgpack.decode(answer[len(FAILED) :], type=Failure)
    # First: the driver takes the first failure in the text, and the message has the user's words.
    return SubtaskError(f"{pack_failure(failure)}\n{failure.message}")


__all__ = ["BEGIN_PROPERTY", "Forward", "SubtaskError"]
