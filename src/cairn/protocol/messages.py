"""The words between driver, forwarder and slot.

    begin   an attempt at an epoch: what `now` is, which parent, which state versions
    run     batches of rows in, batches of the envelope out, the acknowledgement last
    end     a slot is not needed any more

Acknowledgements travel in band, as the last row a subtask emits, and are a
function of epoch, state and input alone: Spark compares the output of a stage that
runs twice. What varies from run to run (timings, places) goes beside them, as `Report`.

Always true here:
- a token orders attempts; a slot refuses every token older than the newest it has seen.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from cairn.protocol.letters import LetterSample
from cairn.sinks.base import Execution
from cairn.storage.files import StateFile
from cairn.storage.manifest import Held


class Token(NamedTuple):
    """Identifies the sender of a call: an execution, and the attempt of Spark's task at it.

    Later ones compare greater.
    """

    term: int
    epoch: int
    execution: Execution
    task_attempt: int = 0


class Compaction(msgspec.Struct, frozen=True, array_like=True):
    """Write the last `count` files of a range anew: as a base, or as one merged delta."""

    kind: Literal["base", "merge"]
    count: int
    tier: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Key groups of a range and the version they are in, where they come from another range."""

    first_group: int
    group_count: int
    version: str

    @property
    def groups(self) -> range:
        return range(self.first_group, self.first_group + self.group_count)


class Begin(msgspec.Struct, frozen=True):
    """The start of an execution, fixed by the coordinator and the same for every subtask."""

    run_id: str
    term: int
    epoch: int
    execution: Execution
    parent: int | None
    now_ms: int
    watermark_ms: int | None
    """As of the parent epoch: timers up to here are due."""
    parallelism: int
    versions: dict[str, list[str]]
    """Per operator, per subtask: the name of the state it must start from."""
    compactions: dict[str, dict[int, Compaction]]
    """Per operator and subtask: what to write anew, in the background."""
    inline_bytes_max: int
    slots: list[int] = []
    """Per subtask, which slot runs it; empty: the one of the same number."""
    pieces: dict[str, list[list[Piece]]] = {}
    """Per operator and subtask, after a change of parallelism: what each range is made of."""
    settled: list[str] = []
    """Files written in the background that need not be announced again, by id."""
    rewrite: list[str] = []
    """Operators whose state gets another form: migrated, and written as a base at once."""

    passed_ms: int | None = None
    """The watermark that the parent epoch ran with: timers up to here have fired."""
    is_draining: bool = False
    """The input has ended: every timer is due that was set before this epoch."""

    pending: str | None = None
    """The object with the state that earlier batches of the epoch stored, for slots that have
    lost it."""
    is_last_round: bool = True
    """Records that are sent back are there for the next epoch; else they are processed in this one,
    and nobody but the slot has to keep them until then."""

    def token(self, task_attempt: int = 0) -> Token:
        """Return the token of a task of this execution."""
        return Token(self.term, self.epoch, self.execution, task_attempt)

    def slot(self, subtask: int) -> int:
        return self.slots[subtask] if self.slots else subtask


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """A slot is to end.

    Such a message may come late, so it says as of when the slot is not needed: one that has begun
    something later stays, and so does one that is there for an epoch to come.
    """

    as_of: Token | None = None
    """The execution that did without the slot; None: end whatever the slot has begun."""


class Compacted(msgspec.Struct, frozen=True):
    """A file written in the background: a base as of an epoch, or several deltas as one."""

    uid: str
    first_group: int
    group_count: int
    kind: Literal["base", "merge"]
    tier: int
    as_of: int
    """The epoch whose state, or whose files, it was made from."""
    replaced: tuple[str, ...]
    """The deltas it stands for as they are listed, in order. A base stands for all to `as_of`."""
    stored: StateFile
    ms: float


class OperatorAck(msgspec.Struct, frozen=True):
    uid: str
    rows_in: int
    rows_out: int
    keys_changed: int
    delta: StateFile | None
    late_rows: int = 0
    untimed_rows: int = 0
    """Rows without an event time; like late ones they are not processed."""
    error_rows: int = 0
    """Rows and timers that the function failed on and that were put aside."""
    broadcast_aside: str = ""
    """Which rows of the broadcast were put aside, as a digest: every subtask must say the same."""
    event_timer_ms: int | None = None
    """The earliest timer that is left, by event time."""
    processing_timer_ms: int | None = None
    partial_count: int = 0
    """In an aggregation, the partials that its rows are combined into, or would be."""


class Ack(msgspec.Struct, frozen=True):
    """A subtask has finished a level of an epoch; everything it names is durable."""

    level: int
    subtask: int
    operators: list[OperatorAck]
    committables: dict[str, Any]


class Report(msgspec.Struct, frozen=True):
    """What a subtask measured, beside the acknowledgement."""

    level: int
    subtask: int
    executor: str
    log: str
    started_ms: int
    finished_ms: int
    begin_ms: float
    """Until the parent's state was at hand, restore included."""
    restored: bool
    process_ms: float
    snapshot_ms: float
    """What the epoch waited for: delta and sink output made durable."""
    compacted: tuple[Compacted, ...] = ()
    """What was written beside the epochs since; announced until it is settled."""
    state_held: dict[str, Held] = {}
    """Per operator, how much it holds, expired state included that is still there."""
    base_failed: str = ""
    """Why a file could not be written in the background; it is tried again."""
    stage: int | None = None
    """The Spark stage it ran in; None without Spark."""
    door: str = ""
    """Where the slot is asked for state."""
    slot_id: str = ""
    """The process of the slot, unique in the run."""
    epoch: int = 0
    execution: Execution = Execution()
    """The execution that was measured. The report of a superseded one does not count."""
    group_rows: dict[str, list[int]] = {}
    """Per operator with keys, rows per bucket of key groups."""
    hot_keys: dict[str, list[tuple[str, int]]] = {}
    """Per operator with keys, those with most rows and about how many."""
    letters: dict[str, list[LetterSample]] = {}
    """Per operator, the first rows that were put aside in this attempt, cut short."""
    user: dict[str, dict[str, dict[str, Any]]] = {}
    """Per operator, what its function counted in this attempt: see `cairn.metrics`."""


class Failure(msgspec.Struct, frozen=True):
    """Why a subtask failed, as it travels through Spark's error text."""

    kind: str
    """The CairnError to raise in the driver, by class name."""
    message: str
    facts: dict[str, Any]


ack_encoder = msgspec.msgpack.Encoder()
ack_decoder = msgspec.msgpack.Decoder(Ack)
report_decoder = msgspec.msgpack.Decoder(Report)
begin_encoder = msgspec.json.Encoder()
begin_decoder = msgspec.json.Decoder(Begin)

FAILURE_MARK = "CAIRN-FAILURE:"


def pack_failure(failure: Failure) -> str:
    """A line that survives being wrapped in Java and Python tracebacks."""
    return FAILURE_MARK + msgspec.json.encode(failure).hex() + ";"


def find_failure(text: str) -> Failure | None:
    """The first failure in an error text of Spark's."""
    start = text.find(FAILURE_MARK)
    if start < 0:
        return None
    start += len(FAILURE_MARK)
    stop = text.find(";", start)
    if stop < 0:
        return None
    return msgspec.json.decode(bytes.fromhex(text[start:stop]), type=Failure)
