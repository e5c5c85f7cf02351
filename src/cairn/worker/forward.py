"""The forwarder: the function Spark runs for each subtask, between Spark and the slot.

It finds the slot (or starts one), begins the attempt, sends the rows of this level
in and yields what comes out. Rows of lanes on their way to a later level, and the
acknowledgements of earlier ones, pass by the slot.

Always true here:
- input is written and output is read on threads of their own with a bounded queue
  between: one thread doing both would deadlock when output outgrows the transport;
- the subtask is taken from the data (the pin column), never from the partition number;
- it holds no state: any worker can forward any epoch.
"""

from __future__ import annotations

import functools
import gc
import queue
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

from cairn.protocol.messages import Begin, Failure, begin_decoder, pack_failure
from cairn.protocol.spec import lane_name
from cairn.slot.process import SlotHome, executor_process
from cairn.slot.server import DONE, ENDED, FAILED, LOAD_FIRST, Call, Loaded

BEGIN_PROPERTY = "cairn.begin"
QUEUE_BATCHES = 8
SLOTS_TRIED_MAX = 3


@functools.cache
def _spare_collector() -> None:
    """Once in a worker: what is loaded by now is of no interest to Python's garbage collector.

    Spark has workers collect after every task, and the next task waits for it: 40 ms, nearly
    all of it spent on the modules of pyarrow, pandas and Spark.
    """
    gc.freeze()


class SubtaskError(RuntimeError):
    """A subtask failed; the text carries a packed Failure through Spark to the driver."""


class Forward:
    """For `mapInArrow`: batches of a level's input in, batches of the envelope out."""

    _clients: ClassVar[dict[str, flight.FlightClient]] = {}

    def __init__(
        self,
        run_id: str,
        level: int,
        lanes: tuple[int, ...],
        schema: pa.Schema,
        spec_id: str,
        spec: bytes,
        reports: Any,
    ) -> None:
        self.run_id = run_id
        self.level = level
        self.lanes = lanes
        self.schema = schema
        self.spec_id = spec_id
        self.spec = spec
        self.reports = reports

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None, "forwarders run in Spark tasks"
        text = task.getLocalProperty(BEGIN_PROPERTY)
        assert text is not None, "the driver says what begins"
        begin = begin_decoder.decode(text)
        first = next(batches)
        subtask = first["pin"][0].as_py()
        home = SlotHome(self.run_id, executor_process(), begin.slot(subtask))
        token = begin.token(task.taskAttemptId())
        call = Call(token, self.spec_id, self.level, subtask, stage=task.stageId())
        try:
            yield from self._forward(self._begin(home, call, begin), call, first, batches)
        except flight.FlightError as error:
            lost = Failure(
                "EpochError",
                f"the slot of subtask {subtask} is gone: {_said(error)}",
                {"subtask": subtask, "log": str(home.log), "executor": home.executor_label},
            )
            raise SubtaskError(pack_failure(lost)) from error
        finally:
            _spare_collector()

    def _begin(self, home: SlotHome, call: Call, begin: Begin) -> flight.FlightClient:
        body = msgspec.msgpack.encode(
            Call(call.token, call.spec_id, call.level, call.subtask, begin)
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
            # It was told to end just now, so the next look finds none and starts another.
        raise RuntimeError(f"slot {home.slot} was told to end again and again")

    def _connect(self, home: SlotHome) -> flight.FlightClient:
        # A worker is reused for many tasks; so is its connection, while the slot lives.
        location = (home.find() or home.start()).location
        client = self._clients.get(location)
        if client is None:
            client = self._clients[location] = flight.connect(location)
        return client

    def _act(self, client: flight.FlightClient, kind: str, body: bytes) -> bytes:
        (result,) = client.do_action(flight.Action(kind, body))
        answer: bytes = result.body.to_pybytes()
        if answer[:1] == FAILED:
            raise _failed(answer)
        return answer

    def _forward(
        self,
        client: flight.FlightClient,
        call: Call,
        first: pa.RecordBatch,
        batches: Iterator[pa.RecordBatch],
    ) -> Iterator[pa.RecordBatch]:
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(msgspec.msgpack.encode(call))
        )
        out: queue.Queue[Any] = queue.Queue(QUEUE_BATCHES)
        stopped = threading.Event()

        def put(item: Any) -> None:
            while not stopped.is_set():
                try:
                    out.put(item, timeout=0.5)
                    return
                except queue.Full:
                    continue

        def write() -> None:
            try:
                names = ["group", "lane", *map(lane_name, self.lanes)]
                if "time" in first.schema.names:
                    names.append("time")
                writer.begin(first.select(names).schema)
                batch: pa.RecordBatch | None = first
                while batch is not None and not stopped.is_set():
                    mine, passing = self._split(batch)
                    if passing is not None:
                        put(passing)
                    if mine.num_rows:
                        writer.write_batch(mine.select(names))
                    batch = next(batches, None)
                writer.done_writing()
                put(None)
            except BaseException as error:
                put(error)

        def read() -> None:
            try:
                while True:
                    try:
                        chunk = reader.read_chunk()
                    except StopIteration:
                        break
                    said = chunk.app_metadata
                    if said is not None and said.size:
                        said = said.to_pybytes()
                        if said[:1] == FAILED:
                            raise _failed(said)
                        self.reports.add([said[len(DONE) :]])
                    if chunk.data is not None:
                        put(chunk.data)
                put(None)
            except BaseException as error:
                put(error)

        threads = [threading.Thread(target=work, daemon=True) for work in (read, write)]
        for thread in threads:
            thread.start()
        errors: list[BaseException] = []
        try:
            done = 0
            while done < len(threads):
                item = out.get()
                if item is None:
                    done += 1
                elif isinstance(item, BaseException):
                    done += 1
                    errors.append(item)
                    # The other thread may wait for input that will not come, from the slot or
                    # from Spark. When it is the slot that is lost, both learn of it.
                    if not isinstance(item, flight.FlightError):
                        break
                else:
                    yield item
            if errors:
                raise next((e for e in errors if isinstance(e, SubtaskError)), errors[0])
        finally:
            stopped.set()
            if done < len(threads) or errors:
                reader.cancel()

    def _split(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """(rows for the slot, rows that pass by); the row of an empty subtask is neither."""
        lanes = batch["lane"]
        mine = pc.is_in(lanes, pa.array(self.lanes, pa.int32()))
        count = mine.true_count
        if count == batch.num_rows:
            return batch, None
        rest = batch.filter(pc.and_(pc.invert(mine), lanes.is_valid()))
        return batch.filter(mine), self._passing(rest) if rest.num_rows else None

    def _passing(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            batch[field.name]
            if field.name in batch.schema.names
            else pa.nulls(batch.num_rows, field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(
            [c.cast(f.type) for c, f in zip(columns, self.schema, strict=True)], schema=self.schema
        )


def _said(error: flight.FlightError) -> str:
    """What is wrong, without what the transport adds for its own authors."""
    return str(error).partition(" gRPC client debug context:")[0].splitlines()[0][:300]


def _failed(answer: bytes) -> SubtaskError:
    failure = msgspec.msgpack.decode(answer[len(FAILED) :], type=Failure)
    # First, as the message has words of the user's: the first failure in the text is taken.
    return SubtaskError(f"{pack_failure(failure)}\n{failure.message}")


__all__ = ["BEGIN_PROPERTY", "Forward", "SubtaskError"]
