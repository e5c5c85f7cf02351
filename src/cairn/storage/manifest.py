"""The records of the log, in memory and on disk.

A reader always gets a whole `Epoch`. On disk a manifest holds the changes since its parent; the
first epoch in each run of FULL_EVERY numbers is written in full. So resolving an epoch never
leaves its run, and its number alone decides if it is full.

On disk a record is one JSON object, {"checksum", "format", "needs", "record"}: the
checksum covers format, needs and the exact bytes of record. This envelope never changes, so
that an old cairn can name the newer one that is needed.

Always true here:
- decode(encode(x)) == x, for an epoch given the same parent;
- damaged bytes raise a CorruptFileError that names the file, never return a wrong record;
- records are immutable, and so are the structs;
- the structs of which a large job has very many hold no cycles, and are not tracked by Python's
  garbage collector (`gc=False`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import xxhash

from cairn.errors import CorruptFileError, RestoreError
from cairn.report.epoch import NOTHING_MEASURED, Measured, Timings
from cairn.report.scaling import Decision

FORMAT: Final = "1.0"
# The oldest cairn that reads FORMAT. The error of an older one shows it.
FORMAT_NEEDS_CAIRN: Final = "0.1"
FULL_EVERY: Final = 20
EMPTY_VERSION: Final = "0" * 32

S = TypeVar("S")


class Ancestor(msgspec.Struct, frozen=True, kw_only=True):
    """The savepoint, or the epoch of another job, that a job's first epoch was made from."""

    kind: Literal["savepoint", "branch"]
    id: str
    """The id of the savepoint, or of the job that was branched."""
    url: str
    epoch: int


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """job.json: the facts of a job that never change."""

    name: str
    job_id: str
    max_parallelism: int
    created_ms: int
    format: str = FORMAT
    ancestor: Ancestor | None = msgspec.field(default=None, name="origin")


class FileRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A file as a manifest lists it: a segment (its own object, or a part of a pack), the index of
    a base in RocksDB or PostgreSQL, or lines of a source's log, which have no key groups.

    It counts for the key groups given here. After a change of parallelism it may also hold rows
    of others, which belong to another range.
    """

    id: str
    path: str
    offset: int
    length: int
    kind: Literal["base", "delta"]
    tier: int
    rows: int
    first_epoch: int
    last_epoch: int
    first_group: int
    group_count: int
    format: Literal["segment", "rocksdb", "postgres", "versions", "lines"] = "segment"
    objects: tuple[str, ...] = ()
    """The other objects it is made of, shared with other bases."""
    objects_bytes: int = 0
    store: str = ""
    """The url of the checkpoint that holds it, if that is another one: a branch's parent."""

    @property
    def groups(self) -> range:
        """The key groups it counts for."""
        return range(self.first_group, self.first_group + self.group_count)

    @property
    def listing(self) -> str:
        """Identifies the file and its key groups: a file may be listed several times."""
        return f"{self.id}:{self.first_group}+{self.group_count}"

    @property
    def size(self) -> int:
        """The bytes of the file and its objects."""
        return self.length + self.objects_bytes


class Held(NamedTuple):
    """The size of a state."""

    keys: int
    """Distinct keys that hold state."""
    entries: int
    """Stored rows: one per entry of a map, else one per key."""


class RangeState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of a range of key groups: a base and the deltas after it, oldest first.

    `version` names exactly the content, however it is laid out in files.
    """

    first_group: int
    group_count: int
    version: str
    files: list[FileRef]
    state_keys: int | None
    """Keys that hold state; None: not counted, in epochs of older versions and of savepoints."""
    state_entries: int = 0
    """Stored rows: one per key of a state, one per entry of a map."""
    state_bytes: int

    @property
    def groups(self) -> range:
        """The key groups of the range."""
        return range(self.first_group, self.first_group + self.group_count)


def keys_in(ranges: Iterable[RangeState]) -> int | None:
    """Return how many keys these ranges hold; None if one of them was not counted."""
    counts = [part.state_keys for part in ranges]
    return None if None in counts else sum(count or 0 for count in counts)


def state_measured(operators: Mapping[str, EpochOperator]) -> Measured:
    """Return the figures of an epoch that has run no rows: only its state is counted."""
    found = {
        uid: msgspec.structs.replace(
            NOTHING_MEASURED,
            state_keys=keys_in(entry.ranges),
            state_entries=sum(part.state_entries for part in entry.ranges),
        )
        for uid, entry in operators.items()
    }
    return Measured(operators=found)


class StateDecl(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    type: str
    entry_type: str | None = None
    ttl: str | None = None
    """A `state.TTL` as text. With one, files hold struct<at: bigint, value: type>."""
    delay_ms: int = 0
    """The lag of event time here behind the job's watermark, for state that expires by it."""


Scope = Literal["keyed", "subtask", "shared", "feedback"]
"""The owner of an operator's state: keys, in ranges of key groups; subtasks, a list each; all
subtasks together, in one range; or a loop, for records on their way back."""


class EpochOperator(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    function_version: str
    key_types: dict[str, str]
    states: dict[str, StateDecl]
    parallelism: int
    ranges: list[RangeState]
    scope: Scope = "keyed"
    owners: int = 0
    """The number of subtasks that got rows, for lists; 0: it is not known."""


def operator_uids(known: Iterable[str], operator: str) -> list[str]:
    """Return the uids of an operator among these: its own, and `<operator>:…` of other scopes."""
    return [uid for uid in known if uid == operator or uid.startswith(f"{operator}:")]


class SourceLog(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A copy of the files that a source keeps in Spark's folder (see `source_logs`)."""

    last: int = -1
    """The number of the newest file in the log of a file source."""
    chunks: list[FileRef] = []
    """Older lines of that log, oldest first."""
    lines: list[str] = []
    """The lines after those in `chunks`."""
    files: dict[str, bytes] = {}
    """Small files of other sources, by their path below sources/<index>/."""


class SparkPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Spark's folder, its batch, and the raw text of the batch's offset file."""

    folder: str
    batch_id: int
    offsets: str
    sources: list[str] = []
    """The names of the sources, in the order of the offsets."""
    logs: dict[int, SourceLog] = {}
    """By index of a source. A source without one has no files, or an older cairn did not keep
    them."""


class Epoch(msgspec.Struct, frozen=True, kw_only=True, tag="epoch", tag_field="kind"):
    """A committed epoch. `oldest_kept` retires every record below it (see retention)."""

    number: int
    parent: int | None
    term: int
    nonce: str
    wall_ms: int
    now_ms: int
    watermarks: dict[str, int | None]
    """Per origin of event time, its own watermark."""
    spark: SparkPosition
    operators: dict[str, EpochOperator]
    committables: dict[str, list[Any]] = {}
    targets: dict[str, str] = {}
    """The target of each sink, as text without secrets; "" for one that ends with the driver."""
    timings: Timings = Timings()
    metrics: Measured = Measured()
    oldest_kept: int = 0
    watermark_ms: int | None = None
    """The job's watermark after this epoch: the next epoch runs with it."""
    passed_ms: int | None = None
    """The watermark that this epoch ran with."""
    seen_ms: dict[str, int] = {}
    """Per origin of event time, the `now` of the last epoch in which it had rows."""
    timers: dict[str, tuple[int | None, int | None]] | None = None
    """Per operator, its earliest timers by event time and by processing time; None: not known."""
    decision: Decision | None = None
    """The decision about the parallelism before this epoch; None: it stayed."""


class Takeover(msgspec.Struct, frozen=True, kw_only=True, tag="takeover", tag_field="kind"):
    """A driver has started; its term is this record's number."""

    number: int
    term: int
    nonce: str
    wall_ms: int
    host: str
    pid: int
    previous: int | None
    guarantee: str = ""
    """The guarantee of the driver; empty: not known."""
    process: str = ""
    """Pid namespace and identity of the driver's process; empty: not known."""


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag="restore", tag_field="kind"):
    """From this record on, the given epoch is the newest one."""

    number: int
    term: int
    nonce: str
    wall_ms: int
    epoch: int


Record = Epoch | Takeover | Restore


def next_version(parent_version: str, delta_id: str) -> str:
    """Return the version of a range after one more delta. Merging files does not change it."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{parent_version}+{delta_id}".encode())
    return digest.hexdigest()


# On disk: an absent field means "as in the parent".


class _StoredRange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    first_group: int
    group_count: int
    same: bool = False
    version: str = ""
    keep: int = 0
    files: list[FileRef] = []
    state_keys: int | None = 0
    state_entries: int | None = None
    """Absent in records of older versions: there `state_keys` counts entries."""
    state_bytes: int = 0


class _About(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of an operator, except for its ranges."""

    function_version: str
    key_types: dict[str, str]
    states: dict[str, StateDecl]
    parallelism: int
    scope: Scope = "keyed"
    owners: int = 0


class _StoredOperator(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    about: _About | None = None
    ranges: list[_StoredRange] | None = None


class StoredEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="epoch", tag_field="kind"):
    """An epoch as it is on disk: complete, or the changes relative to another epoch.

    It has every field of `Epoch`. New ones have a default in both, for records without them.
    """

    number: int
    parent: int | None
    relative_to: int | None = msgspec.field(name="base")
    term: int
    nonce: str
    wall_ms: int
    now_ms: int
    watermarks: dict[str, int | None]
    spark: SparkPosition
    operators: dict[str, _StoredOperator]
    committables: dict[str, list[Any]]
    timings: Timings
    metrics: msgspec.Raw
    oldest_kept: int = 0
    watermark_ms: int | None = None
    passed_ms: int | None = None
    seen_ms: dict[str, int] = {}
    timers: dict[str, tuple[int | None, int | None]] | None = None
    targets: dict[str, str] = {}
    decision: Decision | None = None


StoredRecord = StoredEpoch | Takeover | Restore


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checksum: str
    format: str
    needs: str
    record: msgspec.Raw


_NOTHING: Final[dict[str, Any]] = msgspec.to_builtins(NOTHING_MEASURED)
# order="deterministic" would sort dicts; key_types must keep its order, so none is given.
_encoder: Final = msgspec.json.Encoder()
_decode_envelope: Final = msgspec.json.Decoder(_Envelope).decode
_decode_record: Final[Callable[[bytes], StoredRecord]] = msgspec.json.Decoder(StoredRecord).decode
_decode_job: Final = msgspec.json.Decoder(JobInfo).decode


def is_full(number: int, parent: int | None) -> bool:
    """True if the manifest of this epoch is written in full."""
    return parent is None or number // FULL_EVERY != parent // FULL_EVERY


def encode_epoch(epoch: Epoch, parent: Epoch | None, *, whole: bool = False) -> bytes:
    """Return the bytes of a manifest, relative to its parent unless it is a full one."""
    if whole or is_full(epoch.number, epoch.parent):
        parent = None
    else:
        assert parent is not None and parent.number == epoch.parent, "wrong parent"
    operators = {
        uid: _pack_operator(operator, parent.operators.get(uid) if parent else None)
        for uid, operator in epoch.operators.items()
    }
    fields = {name: getattr(epoch, name) for name in epoch.__struct_fields__}
    fields["operators"] = operators
    fields["metrics"] = msgspec.Raw(_encoder.encode(epoch.metrics))
    return seal(StoredEpoch(relative_to=parent.number if parent else None, **fields))


def encode_record(record: Takeover | Restore | JobInfo) -> bytes:
    return seal(record)


def decode_record(data: bytes, name: str) -> StoredRecord:
    """Return a record as it is stored. An epoch still needs `resolve`."""
    return unseal(data, name, _decode_record)


def decode_job(data: bytes, name: str) -> JobInfo:
    return unseal(data, name, _decode_job)


def resolve(stored: StoredEpoch, before: Epoch | None, name: str = "") -> Epoch:
    """Return the whole epoch, given the one that it is stored relative to."""
    found = before.number if before else None
    if found != stored.relative_to:
        raise CorruptFileError(
            f"epoch {stored.number} was written against {stored.relative_to}, not {found}\n"
            f"  file: {name}",
            file=name,
        )
    try:
        operators = {
            uid: _unpack_operator(uid, operator, before.operators.get(uid) if before else None)
            for uid, operator in stored.operators.items()
        }
    except LookupError as error:
        raise CorruptFileError(
            f"epoch {stored.number} does not fit its parent {stored.relative_to}: {error}\n"
            f"  file: {name}",
            file=name,
        ) from error
    fields = {field: getattr(stored, field) for field in Epoch.__struct_fields__}
    fields["operators"] = operators
    fields["metrics"] = _read_metrics(stored.metrics, name)
    return Epoch(**fields)


def _read_metrics(raw: msgspec.Raw, name: str) -> Measured:
    """Return the metrics of a manifest, those of older versions too."""
    try:
        found = msgspec.json.decode(raw)
        operators = {uid: _read_operator(each) for uid, each in found.get("operators", {}).items()}
        return msgspec.convert({**found, "operators": operators}, Measured)
    except msgspec.ValidationError as error:
        raise _corrupt(name, f"its content does not fit: {error}") from error


def _read_operator(found: dict[str, Any]) -> dict[str, Any]:
    if "state_entries" not in found:
        # An older version counted entries under the names of keys.
        entries, changed = found.get("state_keys", 0), found.get("keys_changed", 0)
        keys = None if entries else 0
        found = {**found, "state_keys": keys, "state_entries": entries, "entries_changed": changed}
    totals = found.get("totals", {})
    if "keys_changed" in totals:
        found = {**found, "totals": {**totals, "entries_changed": totals["keys_changed"]}}
    return _NOTHING | found


def _pack_operator(operator: EpochOperator, before: EpochOperator | None) -> _StoredOperator:
    about = _about(operator)
    if before is None:
        return _StoredOperator(about=about, ranges=[_pack_range(r, None) for r in operator.ranges])
    known = {(r.first_group, r.group_count): r for r in before.ranges}
    ranges = None
    if operator.ranges != before.ranges:
        ranges = [
            _pack_range(r, known.get((r.first_group, r.group_count))) for r in operator.ranges
        ]
    # dict equality ignores order, and the order of the key columns is part of the key.
    same = about == _about(before) and list(about.key_types) == list(before.key_types)
    return _StoredOperator(about=None if same else about, ranges=ranges)


def _pack_range(now: RangeState, before: RangeState | None) -> _StoredRange:
    if before is not None and now == before:
        return _StoredRange(first_group=now.first_group, group_count=now.group_count, same=True)
    keep = 0
    if before is not None:
        for file, file_before in zip(now.files, before.files, strict=False):
            if file != file_before:
                break
            keep += 1
    return _StoredRange(
        first_group=now.first_group,
        group_count=now.group_count,
        version=now.version,
        keep=keep,
        files=now.files[keep:],
        state_keys=now.state_keys,
        state_entries=now.state_entries,
        state_bytes=now.state_bytes,
    )


def _unpack_operator(
    uid: str, stored: _StoredOperator, before: EpochOperator | None
) -> EpochOperator:
    about = stored.about
    if about is None:
        if before is None:
            raise LookupError(f"operator {uid!r} is new but not described")
        about = _about(before)
    known = {(r.first_group, r.group_count): r for r in before.ranges} if before else {}
    if stored.ranges is None:
        if before is None:
            raise LookupError(f"operator {uid!r} is new but has no ranges")
        ranges = before.ranges
    else:
        ranges = [_unpack_range(r, known) for r in stored.ranges]
    return EpochOperator(
        uid=uid,
        function_version=about.function_version,
        key_types=about.key_types,
        states=about.states,
        parallelism=about.parallelism,
        ranges=ranges,
        scope=about.scope,
        owners=about.owners,
    )


def _unpack_range(stored: _StoredRange, known: dict[tuple[int, int], RangeState]) -> RangeState:
    files = stored.files
    if stored.same or stored.keep:
        before = known[stored.first_group, stored.group_count]
        if stored.same:
            return before
        if stored.keep > len(before.files):
            raise LookupError(f"keeps {stored.keep} of {len(before.files)} files")
        files = before.files[: stored.keep] + files
    keys, entries = stored.state_keys, stored.state_entries
    if entries is None:
        keys, entries = (None if keys else 0), keys
    return RangeState(
        first_group=stored.first_group,
        group_count=stored.group_count,
        version=stored.version,
        files=files,
        state_keys=keys,
        state_entries=entries or 0,
        state_bytes=stored.state_bytes,
    )


def _about(operator: EpochOperator) -> _About:
    return _About(
        function_version=operator.function_version,
        key_types=operator.key_types,
        states=operator.states,
        parallelism=operator.parallelism,
        scope=operator.scope,
        owners=operator.owners,
    )


def _checksum(format: str, needs: str, record: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(f"{format}\n{needs}\n".encode() + record)


def seal(record: Any) -> bytes:
    """Return the bytes of a record in its envelope."""
    body = _encoder.encode(record)
    return _encoder.encode(
        _Envelope(
            checksum=_checksum(FORMAT, FORMAT_NEEDS_CAIRN, body),
            format=FORMAT,
            needs=FORMAT_NEEDS_CAIRN,
            record=msgspec.Raw(body),
        )
    )


def unseal(
    data: bytes,
    name: str,
    decode: Callable[[bytes], S],
    *,
    damaged: Callable[[str, str], CorruptFileError] | None = None,
) -> S:
    """Return the sealed record. `damaged(name, what)` makes the error of a damaged file."""
    corrupt = damaged or _corrupt
    try:
        envelope = _decode_envelope(data)
        body = bytes(envelope.record)
        found = _checksum(envelope.format, envelope.needs, body)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise corrupt(name, f"not a record: {error}") from error
    if found != envelope.checksum:
        raise corrupt(name, f"its checksum is {found}, the record says {envelope.checksum}")
    if int(envelope.format.split(".")[0]) > int(FORMAT.split(".")[0]):
        raise RestoreError(
            f"cannot read {name}\n"
            f"  it has format {envelope.format}, this cairn reads up to {FORMAT}\n"
            f"  next: use cairn {envelope.needs} or newer",
            file=name,
            format=envelope.format,
            needs=envelope.needs,
        )
    try:
        return decode(body)
    except msgspec.MsgspecError as error:
        raise corrupt(name, f"its content does not fit: {error}") from error


def _corrupt(name: str, what: str) -> CorruptFileError:
    return CorruptFileError(
        f"a record of the log is damaged: {what}\n"
        f"  file: {name}\n"
        "  next: run `cairn verify`, then roll back to an epoch that is whole",
        file=name,
    )
