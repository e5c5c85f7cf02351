"""A slot's service: Arrow Flight on a Unix socket, for the forwarders beside the executor.

    action load      the job, pickled
    action begin     an attempt at a level of an epoch
    action end       the slot is not needed any more
    exchange run     rows in, envelope out; the last message carries Ack and Report

Always true here:
- an exchange reads a batch, writes what it caused, and only then reads on: memory is
  bounded by the transport's window, however large the epoch;
- a slot that has promised to end begins nothing, and one that has begun something is not ended
  by a message that is older;
- an error goes back as a `Failure` in the body of an answer (a transport's error text is
  short), with the log file of this slot.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from cairn.crash import crash_point
from cairn.errors import CairnError
from cairn.logs import configure_slot, logger, scope
from cairn.protocol.messages import Begin, End, Failure, Token, ack_encoder
from cairn.slot.door import Door, open_door
from cairn.slot.repeats import Repeats, is_of_system
from cairn.slot.runtime import Runtime


class Call(msgspec.Struct):
    """The header that a forwarder sends with each call."""

    token: Token
    spec_id: str
    level: int
    subtask: int
    begin: Begin | None = None
    stage: int | None = None
    """The Spark stage of the task."""


class Loaded(msgspec.Struct):
    token: Token
    spec_id: str
    spec: bytes


call_decoder = msgspec.msgpack.Decoder(Call)

DONE = b"D"
LOAD_FIRST = b"L"
ENDED = b"E"
FAILED = b"F"


class SlotServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves one Runtime. Used by forwarders of this job only: the socket is private."""

    def __init__(
        self, location: str, *, executor: str, log: str, scratch: str, directory: str
    ) -> None:
        super().__init__(location)
        self.runtime = Runtime(scratch=scratch, is_busy=lambda: bool(self._calls))
        self.executor = executor
        self.log = log
        self._directory = directory
        self._door: Door | None = None
        self.slot_id = Path(directory).name
        self.ended = threading.Event()
        self._begun: Token | None = None
        """The latest execution that has begun here."""
        self._begin_or_end = threading.Lock()
        self._repeats = Repeats()
        self._epoch = 0
        """The one under way."""
        self._calls: set[object] = set()
        self._last_used_s = time.monotonic()

    def idle_s(self) -> float:
        """Since the last call ended; a call under way is never idle, however long it takes.

        A slot that is asked for its state is in use too.
        """
        asked_s = 0.0 if self._door is None else self._door.last_used_s
        last_s = max(self._last_used_s, asked_s)
        return 0.0 if self._calls else time.monotonic() - last_s

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        call = object()
        self._calls.add(call)
        try:
            yield
        finally:
            self._last_used_s = time.monotonic()
            self._calls.discard(call)

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        with self._in_use(), scope(job=self._job_name()):
            try:
                answer = self._act(action.type, action.body.to_pybytes())
            except Exception as error:
                answer = self._failure(error)
        yield flight.Result(answer)

    def _act(self, kind: str, body: bytes) -> bytes:
        if kind == "end":
            return msgspec.msgpack.encode(self.end(msgspec.msgpack.decode(body, type=End)))
        if self.ended.is_set():
            return ENDED
        if kind == "load":
            loaded = msgspec.msgpack.decode(body, type=Loaded)
            self.runtime.load(loaded.spec_id, loaded.spec, loaded.token)
            if self.runtime.spec is not None:
                configure_slot(self.runtime.spec.log_format)
            self._open_door()
        elif kind == "begin":
            call = call_decoder.decode(body)
            if call.spec_id != self.runtime.spec_id:
                return LOAD_FIRST
            assert call.begin is not None, "begin says what begins"
            if not self._may_begin(call.begin.token()):
                return ENDED
            level = self.runtime.level(call.level)
            self._epoch = call.begin.epoch
            if call.begin.follows:
                level.follow(call.token, call.begin, call.subtask)
                gc.collect(1)
            else:
                level.begin(call.token, call.begin, call.subtask)
        else:
            raise ValueError(f"no such action: {kind}")
        return DONE

    def _may_begin(self, begun: Token) -> bool:
        with self._begin_or_end:
            self._begun = max(self._begun or begun, begun)
            return not self.ended.is_set()

    def end(self, order: End) -> bool:
        """End the slot, unless it has begun something later than the order. True if it ends."""
        with self._begin_or_end:
            if order.as_of is not None and (self._begun is None or self._begun > order.as_of):
                return False
            self._leave()
            return True

    def leave_if_idle(self, seconds: float) -> bool:
        """End the slot if its last call ended longer ago than this. True if it ends."""
        with self._begin_or_end:
            if self.idle_s() <= seconds:
                return False
            self._leave()
            return True

    def leave(self) -> None:
        """From now on nobody finds this slot, and it begins nothing."""
        with self._begin_or_end:
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            (Path(self._directory) / "pid").rename(Path(self._directory) / "ended")
        self.ended.set()

    def _job_name(self) -> str | None:
        return None if self.runtime.spec is None else self.runtime.spec.job_name

    def _open_door(self) -> None:
        spec = self.runtime.spec
        if self._door is None and spec is not None and spec.door is not None:
            try:
                self._door = open_door(spec.door, self._directory, self.runtime.look_up, self.end)
            except OSError as error:
                # Epochs run without it, and the checkpoint answers.
                logger.warning("no door for queries of state: %s", error)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._in_use(), scope(job=self._job_name()):
            self._exchange(descriptor, reader, writer)
        # Python's collector is off while rows are processed (see process.py); what an
        # epoch left behind is looked at once, here, after the driver has its answer.
        gc.collect(1)
        self.runtime.sweeper.wake()

    def _exchange(self, descriptor: Any, reader: Any, writer: Any) -> None:
        call = call_decoder.decode(descriptor.command)
        token = call.token
        level = self.runtime.level(call.level)
        outgoing = level.spec.outgoing
        started_ms = time.time_ns() // 1_000_000
        try:
            writer.begin(outgoing.schema)
            level.attach(token, writer.write_batch)
            while True:
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    break
                if chunk.data is not None and chunk.data.num_rows:
                    level.run(token, chunk.data)
            ack = level.finish(token)
            report = level.report(
                token,
                executor=self.executor,
                log=self.log,
                started_ms=started_ms,
                stage=call.stage,
                door="" if self._door is None else self._door.address,
                slot_id=self.slot_id,
            )
            report = msgspec.structs.replace(report, memory_excess=self.runtime.memory_excess())
            last = outgoing.pack_acks(pa.array([ack_encoder.encode(ack)], pa.binary()))
            writer.write_with_metadata(last, DONE + msgspec.msgpack.encode(report))
            crash_point("slot.acknowledged")
        except Exception as error:
            level.abandon(token)
            with scope(epoch=token.epoch, subtask=call.subtask):
                writer.write_metadata(self._failure(error))

    def _failure(self, error: Exception) -> bytes:
        operator = error.facts.get("operator") if isinstance(error, CairnError) else None
        where = {} if operator is None else {"operator": operator}
        logger.error("a call failed: %s", type(error).__name__, exc_info=error, extra=where)
        if isinstance(error, CairnError):
            facts = {k: v for k, v in error.facts.items() if isinstance(v, str | int | float)}
            failure = Failure(type(error).__name__, error.message, facts)
        else:
            text = f"a slot failed with {type(error).__name__}: {error}"
            failure = Failure("EpochError", text, {"traceback": traceback.format_exc()})
        if self._repeats.note(self._epoch, error):
            failure.facts["is_repeated"] = True
        if is_of_system(error):
            failure.facts["is_of_system"] = True
        failure.facts.update(log=self.log, executor=self.executor)
        return FAILED + msgspec.msgpack.encode(failure)
