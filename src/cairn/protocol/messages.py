"""Messages between driver, forwarder and slot.

    begin   an execution starts: `now`, the parent epoch, and per subtask the state versions
    run     batches of rows in, batches of the envelope out, the acknowledgement last
    end     a slot is not needed any more

Begin and run come from the forwarder, by the slot's first socket (`slot/server`, which also has
the header of its calls). End comes from the driver, by the second one (`slot/door`, with the
messages of `protocol/lookups`), or by the first one from the same machine.

Acknowledgements travel in band, as the last row a subtask emits. They depend only on epoch,
state and input, because Spark compares the output of a stage that runs twice. Timings and
places vary between runs, so they travel beside them, as `Report`.

Always true here:
- a token orders attempts; a slot refuses every token older than the newest it has seen;
- messages hold no cycles, so Python's garbage collector does not track them (`gc=False`): a large
  job has very many.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import msgspec

from cairn.key_groups import groups_of, starts_within
from cairn.metrics import UserMetrics
from cairn.protocol.slots import slots_after
from cairn.report.epoch import LetterSample
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


class Compaction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An order to rewrite the last `count` files of a range, as a base or as one merged delta."""

    kind: Literal["base", "merge"]
    count: int
    tier: int


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Key groups that come from another range, and their version there."""

    first_group: int
    group_count: int
    version: str

    @property
    def groups(self) -> range:
        return range(self.first_group, self.first_group + self.group_count)


class Part(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The part of a begin message that only one subtask needs."""

    versions: dict[str, str] = {}
    """Per operator, the version of the state it must start from."""
    compactions: dict[str, Compaction] = {}
    """Per operator, files to rewrite in the background."""
    pieces: dict[str, list[Piece]] = {}
    """After a change of ranges, per operator: the pieces of its range."""
    settled: list[str] = []
    """Ids of files written in the background that the slot need not report again."""
    groups: tuple[int, int] | None = None
    """The first key group of the subtask and their number; None: its equal share."""

    def own(self, subtask: int, parallelism: int, group_count: int, most: int = 0) -> range:
        """Return the key groups of the subtask, in an operator that at most `most` subtasks run."""
        if 0 < most < parallelism:
            starts = starts_within(most, parallelism, group_count)
            return groups_of(subtask, parallelism, group_count, starts)
        if self.groups is None:
            return groups_of(subtask, parallelism, group_count)
        first, count = self.groups
        return range(first, first + count)


class PartsAt(msgspec.Struct, frozen=True, array_like=True):
    """An object with the parts of all subtasks, each in a record of the same length."""

    path: str
    record_bytes: int


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a batch that a round reads, if they do not fit into memory at once."""

    index: int = 0
    count: int = 1
    """The slices of the batch; 1: it is read whole."""

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.count


WHOLE: Final = Slice()


class Begin(msgspec.Struct, frozen=True):
    """The start of an execution, fixed by the coordinator.

    Every Spark task carries it, so its size must not grow with the parallelism: parts of many
    subtasks are in an object (see `protocol/parts`).
    """

    run_id: str
    term: int
    epoch: int
    execution: Execution
    parent: int | None
    now_ms: int
    watermark_ms: int | None
    """The watermark of the parent epoch: timers up to here are due."""
    parallelism: int
    group_count: int
    inline_bytes_max: int
    parts: dict[int, Part] = {}
    """The part of each subtask; empty: they are in `parts_at`."""
    parts_at: PartsAt | None = None
    rescaled_from: tuple[int, ...] = ()
    """Earlier parallelisms of the run, oldest first: with them the slot of a subtask is known."""
    rewrite: list[str] = []
    """Operators whose state is migrated and written as a base at once."""

    passed_ms: int | None = None
    """The watermark that the parent epoch ran with: timers up to here have fired."""
    is_draining: bool = False
    """The input has ended: all timers that were set before this epoch are due."""

    pending: str | None = None
    """The object with the state that earlier batches of the epoch stored, for slots that have
    lost it."""
    follows: bool = False
    """True: slots of a standby bring their state to the parent's version, and run nothing."""
    is_last_round: bool = True
    """True: records that loops send back are stored for the next epoch. False: the next round
    processes them, and only the slot keeps them until then."""
    slice: Slice | None = WHOLE
    """The rows of the batch that the round reads; None: none, but records that loops send back."""
    is_divisible: bool = False
    """True: a slot that is short of memory may stop the attempt. The next one has more slices."""

    def token(self, task_attempt: int = 0) -> Token:
        """Return the token of a task of this execution."""
        return Token(self.term, self.epoch, self.execution, task_attempt)

    def slot(self, subtask: int) -> int:
        """Return the slot that runs a subtask."""
        if not self.rescaled_from:
            return subtask
        return slots_after((*self.rescaled_from, self.parallelism), self.group_count)[subtask]


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """An order to a slot to end.

    It may arrive late. A slot that has begun a later execution stays, and so does one that was
    started for an epoch to come.
    """

    as_of: Token | None = None
    """The execution that did without the slot; None: end whatever the slot has begun."""


class Compacted(msgspec.Struct, frozen=True, gc=False):
    """A file written in the background: a base as of an epoch, or several merged deltas."""

    uid: str
    first_group: int
    group_count: int
    kind: Literal["base", "merge"]
    tier: int
    as_of: int
    """The epoch whose state or files it was made from."""
    replaced: tuple[str, ...]
    """The deltas that a merge replaces, as listed, in order. A base replaces all up to `as_of`."""
    stored: StateFile
    ms: float


class OperatorAck(msgspec.Struct, frozen=True, gc=False):
    uid: str
    rows_in: int
    rows_out: int
    keys_changed: int
    """Keys of values and lists, entries of maps: `entries_changed` of a report."""
    delta: StateFile | None
    late_rows: int = 0
    untimed_rows: int = 0
    """Rows without an event time: not processed, like late ones."""
    error_rows: int = 0
    """Rows and timers that the function failed on and that became dead letters."""
    broadcast_aside: str = ""
    """Digest of the broadcast rows that became dead letters: the same in every subtask."""
    event_timer_ms: int | None = None
    """The earliest event timer that is left."""
    processing_timer_ms: int | None = None
    partial_count: int = 0
    """In an aggregation, the partials that its rows are combined into, or would be."""


class Ack(msgspec.Struct, frozen=True, gc=False):
    """A subtask has finished a level of an epoch; everything it names is durable."""

    level: int
    subtask: int
    operators: list[OperatorAck]
    committables: dict[str, Any]
    sink_rows: dict[str, int] = {}
    """Per sink that no operator of the level feeds, the rows that came to it."""


class Report(msgspec.Struct, frozen=True, gc=False):
    """Measurements of a subtask, beside its acknowledgement."""

    level: int
    subtask: int
    executor: str
    log: str
    started_ms: int
    finished_ms: int
    begin_ms: float
    """Time until the parent's state was loaded, including a restore."""
    restored: bool
    process_ms: float
    snapshot_ms: float
    """Time to make delta and sink output durable."""
    compacted: tuple[Compacted, ...] = ()
    """Files written in the background, reported until the driver confirms them."""
    state_held: dict[str, Held] = {}
    """Per operator, the amount of state, including expired state that is not removed yet."""
    base_failed: str = ""
    """Error of a file that could not be written in the background; the slot tries again."""
    memory_excess: str = ""
    """The memory and largest states of a slot that is near its limit; empty: it is not."""
    stage: int | None = None
    """The Spark stage of the subtask; None without Spark."""
    door: str = ""
    """The address of the slot for lookups."""
    slot_id: str = ""
    """The id of the slot's process, unique in the run."""
    epoch: int = 0
    execution: Execution = Execution()
    """The execution that was measured. The report of a superseded one does not count."""
    group_rows: dict[str, tuple[int, list[int]]] = {}
    """Per operator with keys, the first bucket of key groups with rows, and rows per bucket from
    there: a subtask has rows of few buckets."""
    hot_keys: dict[str, list[tuple[str, int]]] = {}
    """Per operator with keys, the keys with most rows and about how many."""
    letters: dict[str, list[LetterSample]] = {}
    """Per operator, the first dead letters of this attempt, cut short."""
    user: dict[str, UserMetrics] = {}
    """Per operator, the metrics of its function in this attempt."""
    row_bytes: int = 0
    """The mean size of a row, in the batch of the largest rows that came from Spark."""


class Failure(msgspec.Struct, frozen=True):
    """The failure of a subtask, as it travels through Spark's error text."""

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
    """Encode a failure so that it survives in Java and Python tracebacks."""
    return FAILURE_MARK + msgspec.json.encode(failure).hex() + ";"


def find_failure(text: str) -> Failure | None:
    """Return the first failure in Spark's error text; None if it has none."""
    start = text.find(FAILURE_MARK)
    if start < 0:
        return None
    start += len(FAILURE_MARK)
    stop = text.find(";", start)
    if stop < 0:
        return None
    return msgspec.json.decode(bytes.fromhex(text[start:stop]), type=Failure)
