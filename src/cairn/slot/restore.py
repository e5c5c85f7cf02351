"""State out of files and into files: restore, bases, merged deltas.

Always true here:
- only the key groups that are missing are read, from files indexed by key group;
- state that the parent epoch does not name is not restored, whatever old files hold;
- a base is of a moment when nothing uncommitted is in the state;
- what is written is named by content, so writing it twice is harmless.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa

from cairn.backends.contract import Base, BaseTarget, Origin
from cairn.backends.files import RowsReader, open_rows
from cairn.crash import crash_point
from cairn.errors import RestoreError
from cairn.key_groups import overlap
from cairn.protocol.messages import Begin, Compacted, Compaction
from cairn.slot.compactor import Pace, Work
from cairn.slot.holding import Holding
from cairn.snapshots.reader import EpochReader
from cairn.state import Declaration
from cairn.storage.files import SegmentWriter
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, EpochOperator, FileRef, RangeState
from cairn.storage.pack import write_segment_file
from cairn.storage.store import Store
from cairn.types.evolution import reshape, revives

MERGE_ROWS = 32 * 1024


def restore(
    holding: Holding,
    store: Store,
    epoch: Epoch,
    missing: Sequence[range],
    scratch: str,
    begin: Begin | None = None,
) -> None:
    """Bring these key groups, which are empty, to an epoch.

    What had expired before the epoch that begins is left out.
    """
    entry = _entry(holding.uid, epoch.operators)
    names = holding.tables.keys() & entry.states.keys()
    revived = {n for n in names if revives(entry.states[n], holding.tables[n].declaration)}
    into = _Into(holding, epoch, begin)
    if begin is not None:
        holding.backend.begin_restore(_origin(store, epoch, begin))
    for part in entry.ranges:
        for ref in part.files:
            for groups in filter(None, (overlap(gap, ref.groups) for gap in missing)):
                if ref.kind == "base" and not revived:
                    if holding.backend.load(store, ref, groups):
                        continue
                elif ref.kind == "delta" and holding.backend.has(ref, groups):
                    continue
                with open_rows(store, ref, scratch) as reader:
                    for name in (names - revived) & set(reader.states):
                        for batch in reader.read(name, groups):
                            into.apply(name, batch, is_whole=ref.kind == "base")
    for gap in missing if revived else ():
        _restore_visible(into, store, scratch, gap, sorted(revived))


def catch_up(
    holding: Holding, store: Store, epoch: Epoch, scratch: str, begin: Begin | None = None
) -> bool:
    """Bring state of an ancestor to an epoch by the later deltas; False if they are not enough.

    A base may have replaced some of them: then the state is as before, and is to be restored. A
    merged delta may begin before the ancestor: it holds final values, so it does no harm.
    """
    entry, held = _entry(holding.uid, epoch.operators), holding.as_of
    assert held is not None, "the epoch of the state is known"
    names = holding.tables.keys() & entry.states.keys()
    if any(revives(entry.states[name], holding.tables[name].declaration) for name in names):
        return False
    files = [
        (ref, groups)
        for part in entry.ranges
        for ref in part.files
        if ref.last_epoch > held and (groups := overlap(holding.groups, ref.groups))
    ]
    if any(ref.kind == "base" for ref, _ in files):
        return False
    holding.begin_catching_up()
    into = _Into(holding, epoch, begin)
    for ref, groups in files:
        with open_rows(store, ref, scratch) as reader:
            for name in names & set(reader.states):
                for batch in reader.read(name, groups):
                    into.apply(name, batch, is_whole=False)
    return True


def _origin(store: Store, epoch: Epoch, begin: Begin) -> Origin:
    log = Log(store)

    @functools.cache
    def descends_from(number: int, nonce: str) -> bool:
        try:
            held = epoch
            # As in `is_ancestor`.
            while held.parent is not None and number < held.number > held.parent:
                held = log.epoch(held.parent)
        except RestoreError:
            return False
        return held.number == number and held.nonce == nonce

    return Origin(begin.term, begin.epoch, begin.follows, descends_from)


def is_ancestor(log: Log, number: int, epoch: Epoch) -> bool:
    """True if an epoch descends from the one with this number, as far as the log still has it."""
    try:
        # A branch's first epoch has a parent in another log, with any number.
        while epoch.parent is not None and number < epoch.number > epoch.parent:
            epoch = log.epoch(epoch.parent)
    except RestoreError:
        return False
    return epoch.number == number


def _restore_visible(
    into: _Into, store: Store, scratch: str, groups: range, names: list[str]
) -> None:
    """State that is to live longer than it did: what had expired stays gone, item by item."""
    uid = into.holding.uid
    with EpochReader(store, into.epoch, scratch) as reader:
        columns = reader.columns(uid)
        for chunk in reader.chunks(uid, groups, names):
            for name, batches in chunk.rows.items():
                for batch in batches:
                    into.apply(name, columns[name].to_stored(batch), is_whole=True)


class _Into:
    """Target of a restore: it applies stored rows in the declared form."""

    def __init__(self, holding: Holding, epoch: Epoch, begin: Begin | None) -> None:
        self.holding = holding
        self.epoch = epoch
        self._begin = begin
        self._states = epoch.operators[holding.uid].states

    def apply(self, name: str, batch: pa.RecordBatch, *, is_whole: bool) -> None:
        holding, table = self.holding, self.holding.tables[name]
        rows = reshape(
            batch,
            table.declaration,
            holding.key_type,
            operator=holding.uid,
            held=self._states[name],
            stamp_ms=stamp_ms(table.declaration, self.epoch),
        )
        expired_ms = None if self._begin is None else holding.floor_ms(table, self._begin)
        if expired_ms is not None:
            # Expired rows of a delta stay as deletions: earlier files may hold the keys.
            rows = table.leave_out_expired(rows, expired_ms, keep_rows=not is_whole)
        table.apply(rows)
        if holding.timers is not None:
            holding.timers.apply(name, rows)


def stamp_ms(declaration: Declaration, epoch: Epoch) -> int:
    """Return the write time of values that were stored without one."""
    ttl = declaration.ttl
    is_event = ttl is not None and ttl.clock == "event"
    return epoch.watermark_ms if is_event and epoch.watermark_ms is not None else epoch.now_ms


def base_work(holding: Holding, store: Store, begin: Begin, scratch: str) -> Work:
    """The whole state as of the parent epoch, as one base. Captured now, written later."""
    base = holding.backend.begin_base(holding.tables, holding.groups)
    groups, uid = holding.groups, holding.uid

    def run(pace: Pace) -> Compacted:
        return write_base(base, uid, groups, store, begin, scratch, pace)

    return Work(uid, run, base.close, holding.backend.is_short_of_memory)


def write_base(
    base: Base,
    uid: str,
    groups: range,
    store: Store,
    begin: Begin,
    scratch: str,
    pace: Pace | None = None,
) -> Compacted:
    """Write a base of the parent epoch: paced, or at once for an epoch that waits for it."""
    assert begin.parent is not None, "a base is of a committed epoch"
    started = time.perf_counter()
    parent = Log(store).epoch(begin.parent)
    entry = _entry(uid, parent.operators)
    target = BaseTarget(
        store=store,
        term=begin.term,
        operator=uid,
        epoch=begin.parent,
        scratch=scratch,
        inline_bytes_max=begin.inline_bytes_max,
        known=tuple(
            ref
            for part in entry.ranges
            for ref in part.files
            if ref.kind == "base" and not ref.store
        ),
        epoch_term=parent.term,
        epoch_nonce=parent.nonce,
        is_awaited=pace is None,
    )
    crash_point("slot.base.begun")
    stored = base.write(target, pace or _go_on)
    crash_point("slot.base.written")
    return Compacted(
        uid=uid,
        first_group=groups.start,
        group_count=len(groups),
        kind="base",
        tier=0,
        as_of=begin.parent,
        replaced=(),
        stored=stored,
        ms=(time.perf_counter() - started) * 1000,
    )


def _go_on() -> None:
    """Take no rest."""


def apply_work(holding: Holding, store: Store, begin: Begin) -> Work:
    """The changes up to the parent epoch, for a database that has one version of the rows."""
    applying = holding.backend.begin_apply(holding.groups)

    def run(pace: Pace) -> None:
        assert begin.parent is not None, "applied changes are committed"
        parent = Log(store).epoch(begin.parent)
        applying.apply(begin.term, parent.number, parent.nonce, pace)

    return Work(holding.uid, run, applying.close, holding.backend.is_short_of_memory)


def merge_work(
    holding: Holding, compaction: Compaction, store: Store, begin: Begin, scratch: str
) -> Work:
    """The last few deltas of the range as one: of each key the last word."""
    groups, uid = holding.groups, holding.uid

    def run(pace: Pace) -> Compacted | None:
        return _merge(holding, groups, compaction, store, begin, scratch, pace)

    return Work(uid, run, lambda: None)


def _merge(
    holding: Holding,
    groups: range,
    compaction: Compaction,
    store: Store,
    begin: Begin,
    scratch: str,
    pace: Pace,
) -> Compacted | None:
    assert begin.parent is not None, "nothing to merge without a parent epoch"
    uid = holding.uid
    started = time.perf_counter()
    part = _range(_entry(uid, Log(store).epoch(begin.parent).operators), groups)
    refs = part.files[-compaction.count :]
    if len(refs) < 2 or any(ref.kind == "base" for ref in refs):
        return None
    with (
        tempfile.NamedTemporaryFile(dir=scratch, prefix="merge-") as file,
        contextlib.ExitStack() as opened,
    ):
        writer = SegmentWriter(
            file,
            "delta",
            uid,
            first_epoch=refs[0].first_epoch,
            last_epoch=refs[-1].last_epoch,
        )
        readers = [(ref, opened.enter_context(open_rows(store, ref, scratch))) for ref in refs]
        for name in sorted({name for _, reader in readers for name in reader.states}):
            table = holding.tables.get(name)
            begun = False
            for batches in _by_groups(name, readers, groups):
                if table is None:
                    break  # The state was dropped, and a base without it is being written.
                merged = table.merge(batches)
                if not begun:
                    writer.begin_state(name, merged.schema)
                    begun = True
                writer.write(merged)
                pace()
        written = writer.finish()
        file.flush()
        if not written.rows:
            return None
        stored = write_segment_file(
            store, written, file.name, begin.term, inline_bytes_max=begin.inline_bytes_max
        )
    return Compacted(
        uid=uid,
        first_group=groups.start,
        group_count=len(groups),
        kind="merge",
        tier=compaction.tier,
        as_of=begin.parent,
        replaced=tuple(ref.listing for ref in refs),
        stored=stored,
        ms=(time.perf_counter() - started) * 1000,
    )


def _by_groups(
    name: str, readers: Sequence[tuple[FileRef, RowsReader]], groups: range
) -> Iterator[list[pa.RecordBatch]]:
    """The rows of a state in all files, a few key groups at a time."""
    rows = sum(ref.rows for ref, _ in readers)
    step = max(1, len(groups) * MERGE_ROWS // max(1, rows))
    for start in range(groups.start, groups.stop, step):
        some = range(start, min(start + step, groups.stop))
        batches = [
            batch
            for ref, reader in readers
            if (owned := overlap(some, ref.groups))
            for batch in reader.read(name, owned)
        ]
        if batches:
            yield batches


def _entry(uid: str, operators: dict[str, EpochOperator]) -> EpochOperator:
    entry = operators.get(uid)
    if entry is None:
        raise RestoreError(
            f"the parent epoch has no operator {uid!r}, though a version of its state is asked for"
        )
    return entry


def _range(entry: EpochOperator, groups: range) -> RangeState:
    for part in entry.ranges:
        if part.groups == groups:
            return part
    raise RestoreError(f"operator {entry.uid!r} has no range {groups} to compact")
