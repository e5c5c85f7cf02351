"""State out of files and into files: restore, bases, merged deltas.

Always true here:
- only the key groups that are owned are read, from files indexed by key group;
- a base is written when nothing uncommitted is in the state;
- what is written is named by content, so writing it twice is harmless.
"""

from __future__ import annotations

import os
import tempfile

import pyarrow as pa

from cairn.errors import RestoreError
from cairn.slot.operator import Operator
from cairn.slot.protocol import Begin, Compaction, Stored
from cairn.storage.files import SegmentWriter, StatePart, encode_segment, open_segment
from cairn.storage.log import Log
from cairn.storage.manifest import FileRef, OperatorEntry, RangeState
from cairn.storage.pack import write_segment, write_segment_file
from cairn.storage.store import Store


def restore(operator: Operator, log: Log, store: Store, epoch_number: int) -> None:
    """Bring an empty operator to a committed epoch."""
    for part in _entry(operator, log, epoch_number).ranges:
        for ref in part.files:
            groups = _overlap(operator.groups, ref)
            if not groups:
                continue
            reader = open_segment(store, ref)
            for name in reader.states:
                table = operator.tables.get(name)
                if table is not None:
                    for batch in reader.read(name, groups):
                        table.apply(batch)


def write_base(operator: Operator, store: Store, begin: Begin, scratch: str) -> Stored:
    """The whole state as of the parent epoch, as one file."""
    assert begin.parent is not None
    with tempfile.NamedTemporaryFile(dir=scratch, prefix="base-", delete=False) as file:
        try:
            writer = SegmentWriter(
                file, "base", operator.spec.uid, first_epoch=0, last_epoch=begin.parent
            )
            for name, table in sorted(operator.tables.items()):
                schema = None
                for batch in table.dump():
                    if schema is None:
                        schema = batch.schema
                        writer.begin_state(name, schema)
                    writer.write(batch)
            written = writer.finish()
            file.flush()
            if written.length <= begin.inline_bytes_max:
                with open(file.name, "rb") as small:
                    return Stored(written.id, written.length, written.rows, data=small.read())
            at = write_segment_file(store, file.name, written, begin.term)
            return Stored(written.id, written.length, written.rows, path=at.path)
        finally:
            os.unlink(file.name)


def merge_files(
    operator: Operator, compaction: Compaction, log: Log, store: Store, begin: Begin
) -> Stored | None:
    """The last few deltas of the range as one: of each key the last word."""
    assert begin.parent is not None
    part = _range(_entry(operator, log, begin.parent), operator.groups)
    refs = part.files[-compaction.count :]
    batches: dict[str, list[pa.RecordBatch]] = {}
    for ref in refs:
        groups = _overlap(operator.groups, ref)
        reader = open_segment(store, ref)
        for name in reader.states:
            if name in operator.tables:
                batches.setdefault(name, []).extend(reader.read(name, groups))
    parts = [
        StatePart(name, operator.tables[name].merge(rows))
        for name, rows in sorted(batches.items())
        if rows
    ]
    if not parts:
        return None
    segment = encode_segment(
        "delta",
        operator.spec.uid,
        parts,
        first_epoch=refs[0].first_epoch,
        last_epoch=refs[-1].last_epoch,
    )
    if len(segment.data) <= begin.inline_bytes_max:
        return Stored(segment.id, len(segment.data), segment.rows, data=segment.data)
    at = write_segment(store, segment, begin.term)
    return Stored(segment.id, len(segment.data), segment.rows, path=at.path)


def _entry(operator: Operator, log: Log, epoch_number: int) -> OperatorEntry:
    entry = log.epoch(epoch_number).operators.get(operator.spec.uid)
    if entry is None:
        raise RestoreError(
            f"epoch {epoch_number} has no operator {operator.spec.uid!r}, "
            "though a version of its state is asked for"
        )
    return entry


def _range(entry: OperatorEntry, groups: range) -> RangeState:
    for part in entry.ranges:
        if part.first_group == groups.start and part.group_count == len(groups):
            return part
    raise RestoreError(f"operator {entry.uid!r} has no range {groups} to compact")


def _overlap(groups: range, ref: FileRef) -> range:
    """The key groups a file is listed for, of those that are owned."""
    return range(
        max(groups.start, ref.first_group),
        min(groups.stop, ref.first_group + ref.group_count),
    )
