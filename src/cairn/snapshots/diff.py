"""Compare two epochs of a job: keys added, changed and removed, per state.

The epochs may have different lineages and parallelism. Key groups with the same files in both are
not read at all; in the others, only keys in files that differ are merged and compared. So epochs
close to each other cost little.

Always true here:
- counts are exact, whatever the limit of examples;
- applying the difference to the first epoch's state gives the second's;
- nothing is written, not even a hold: an epoch that is retired meanwhile is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa

from cairn.errors import CorruptFileError, StateNotFoundError
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.holds import check_kept
from cairn.snapshots.reader import EpochReader
from cairn.state import ONE_VALUE_KINDS
from cairn.storage.log import Log
from cairn.storage.manifest import (
    EMPTY_VERSION,
    Epoch,
    EpochOperator,
    FileRef,
    operator_uids,
)
from cairn.storage.store import Store

CHUNK_ROWS: Final = 1 << 18

Side = Literal["before", "after"]
Held = dict[tuple[Any, Any], Any]
"""Values by key and entry."""
_ABSENT: Final = object()


class Example(NamedTuple):
    """A key (for maps with an entry), and its values; None if it has none."""

    key: Any
    entry: Any
    before: Any
    after: Any


@dataclass
class StateDiff:
    """The difference in one state. `only_in` names the epoch that has it, if the other does not."""

    operator: str
    state: str
    kind: str
    type: str
    key_names: list[str]
    only_in: Side | None = None
    added: int = 0
    changed: int = 0
    removed: int = 0
    added_examples: list[Example] = field(default_factory=list)
    changed_examples: list[Example] = field(default_factory=list)
    removed_examples: list[Example] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.added or self.changed or self.removed)


def diff_epochs(
    store: Store,
    a: int,
    b: int,
    *,
    operator: str | None = None,
    state: str | None = None,
    limit: int = 10,
    check: Callable[[], None] = lambda: None,
) -> list[StateDiff]:
    """Return the changes from epoch `a` to epoch `b` in all states, or in those named.

    `check` is called for each piece that is read, and may raise to stop.
    """
    log = Log(store)
    before, after = log.epoch(a), log.epoch(b)
    wanted = _select_states(before, after, operator, state)
    try:
        with EpochReader(store, before) as old, EpochReader(store, after) as new:
            found = [
                diff
                for uid, names in wanted.items()
                for diff in _diff_operator(old, new, uid, names, limit, check)
            ]
    except CorruptFileError:
        check_kept(Log(store), min(a, b))
        raise
    return found


def diff_pieces(before: Epoch, after: Epoch, uid: str) -> int:
    """Return the number of pieces that `changes` of an operator can be divided into."""
    pair = before.operators.get(uid), after.operators.get(uid)
    return sum(1 for _ in _differing(*pair, skip_equal=False))


def changes(
    old: EpochReader, new: EpochReader, uid: str, state: str, pieces: Collection[int]
) -> Iterator[tuple[str, Example]]:
    """Yield ("added" | "changed" | "removed", example) for a state, in some of the pieces."""
    before, after = old.epoch.operators.get(uid), new.epoch.operators.get(uid)
    old_columns = {} if before is None else _of(old.columns(uid), [state])
    new_columns = {} if after is None else _of(new.columns(uid), [state])
    is_everywhere = bool(old_columns and new_columns)
    by_files = is_everywhere and not _expire_between(old_columns, new_columns)
    for number, piece in enumerate(_differing(before, after, skip_equal=False)):
        if number not in pieces or (by_files and piece.is_equal):
            continue
        keys = _find_changed_keys(old, new, piece, new_columns) if by_files else None
        left = _read(old, uid, piece.groups, old_columns, keys).get(state, [])
        right = _read(new, uid, piece.groups, new_columns, keys).get(state, [])
        if is_everywhere and _same_rows(left, right):
            continue
        diff = StateDiff(uid, state, "", "", [])
        held = _decode(old_columns[state], left) if old_columns else {}
        found = _decode(new_columns[state], right) if new_columns else {}
        _compare(diff, held, found, limit=len(held) + len(found))
        yield from (("added", each) for each in diff.added_examples)
        yield from (("changed", each) for each in diff.changed_examples)
        yield from (("removed", each) for each in diff.removed_examples)


def _select_states(
    before: Epoch, after: Epoch, operator: str | None, state: str | None
) -> dict[str, list[str]]:
    """Return the states to compare, by operator, in the order of the later epoch."""
    uids = [*after.operators, *(uid for uid in before.operators if uid not in after.operators)]
    if operator is not None and not operator_uids(uids, operator):
        raise StateNotFoundError(
            f"neither epoch {before.number} nor epoch {after.number} has operator {operator!r}\n"
            f"  found: {', '.join(uids) or 'none'}",
            operator=operator,
        )
    known: dict[str, list[str]] = {}
    for uid in uids:
        if operator is None or operator_uids([uid], operator):
            sides = [e.operators[uid].states for e in (after, before) if uid in e.operators]
            known[uid] = list(dict.fromkeys(name for states in sides for name in states))
    if state is None:
        return known
    if not any(state in names for names in known.values()):
        found = ", ".join(f"{uid}.{name}" for uid, names in known.items() for name in names)
        raise StateNotFoundError(
            f"neither epoch has a state {state!r}\n  found: {found or 'none'}", state=state
        )
    return {uid: [state] for uid, names in known.items() if state in names}


def _diff_operator(
    old: EpochReader,
    new: EpochReader,
    uid: str,
    names: list[str],
    limit: int,
    check: Callable[[], None],
) -> list[StateDiff]:
    before, after = old.epoch.operators.get(uid), new.epoch.operators.get(uid)
    old_columns = {} if before is None else _of(old.columns(uid), names)
    new_columns = {} if after is None else _of(new.columns(uid), names)
    shared = {
        name: StateDiff(uid, name, columns.decl.kind, columns.decl.type, columns.key_names)
        for name, columns in new_columns.items()
        if name in old_columns and is_comparable(old_columns[name], columns)
    }
    # A state with another kind or other keys counts as removed and added.
    gone = _one_sided(uid, old_columns, shared, "before")
    come = _one_sided(uid, new_columns, shared, "after")
    # Equal files prove nothing for a state that only one epoch declares, nor for rows that
    # expired between the two.
    by_files = not gone and not come and not _expire_between(old_columns, new_columns)
    for piece in _differing(before, after, skip_equal=by_files):
        check()
        keys = _find_changed_keys(old, new, piece, new_columns) if by_files else None
        left = _read(old, uid, piece.groups, old_columns, keys)
        right = _read(new, uid, piece.groups, new_columns, keys)
        for name, diff in shared.items():
            if not _same_rows(left[name], right[name]):
                held = _decode(old_columns[name], left[name], check)
                _compare(diff, held, _decode(new_columns[name], right[name], check), limit)
        for name, diff in gone.items():
            _compare(diff, _decode(old_columns[name], left[name], check), {}, limit)
        for name, diff in come.items():
            _compare(diff, {}, _decode(new_columns[name], right[name], check), limit)
    by_name = [[gone.get(name), shared.get(name), come.get(name)] for name in names]
    return [diff for diffs in by_name for diff in diffs if diff is not None]


def _of(columns: dict[str, StateColumns], names: list[str]) -> dict[str, StateColumns]:
    return {name: each for name, each in columns.items() if name in names}


def is_comparable(left: StateColumns, right: StateColumns) -> bool:
    """True if two states of the same name can be compared key by key."""
    kinds = {left.decl.kind, right.decl.kind}
    is_same = len(kinds) == 1 or kinds <= ONE_VALUE_KINDS
    return is_same and left.key_type == right.key_type


def _expire_between(before: dict[str, StateColumns], after: dict[str, StateColumns]) -> bool:
    return any(
        (columns.ttl, columns.floor_ms) != (before[name].ttl, before[name].floor_ms)
        for name, columns in after.items()
    )


def _one_sided(
    uid: str, columns: dict[str, StateColumns], shared: Mapping[str, StateDiff], side: Side
) -> dict[str, StateDiff]:
    return {
        name: StateDiff(uid, name, each.decl.kind, each.decl.type, each.key_names, only_in=side)
        for name, each in columns.items()
        if name not in shared
    }


class _Piece(NamedTuple):
    """A run of key groups whose rows come from the same files."""

    groups: range
    before: list[FileRef]
    after: list[FileRef]
    is_equal: bool
    """Both sides have the same version, or the same files."""


def _differing(
    before: EpochOperator | None, after: EpochOperator | None, *, skip_equal: bool
) -> Iterator[_Piece]:
    """Yield the key groups that may differ, in pieces that fit in memory."""
    left, right = _content(before), _content(after)
    both = [operator for operator in (before, after) if operator is not None]
    row_count = sum(ref.rows for operator in both for part in operator.ranges for ref in part.files)
    group_count = max(len(left), len(right))
    step = max(1, CHUNK_ROWS * group_count // max(1, row_count))
    start = 0
    while start < group_count:
        pair = left.get(start, _NOTHING), right.get(start, _NOTHING)
        end = start + 1
        while end < min(start + step, group_count) and pair == (
            left.get(end, _NOTHING),
            right.get(end, _NOTHING),
        ):
            end += 1
        is_equal = _is_equal(*pair)
        if not (skip_equal and is_equal):
            yield _Piece(range(start, end), pair[0].files, pair[1].files, is_equal)
        start = end


class _Content(NamedTuple):
    """The source of a key group's rows: the version of its range, and the files."""

    part: tuple[int, int, str] | None
    files: list[FileRef]


_NOTHING: Final = _Content(None, [])


def _content(operator: EpochOperator | None) -> dict[int, _Content]:
    found = {}
    for part in [] if operator is None else operator.ranges:
        version = (part.first_group, part.group_count, part.version)
        for group in part.groups:
            files = [
                ref
                for ref in part.files
                if ref.first_group <= group < ref.first_group + ref.group_count
            ]
            found[group] = _Content(version, files)
    return found


def _is_equal(left: _Content, right: _Content) -> bool:
    if left.part is not None and left.part == right.part and left.part[2] != EMPTY_VERSION:
        return True
    return [ref.id for ref in left.files] == [ref.id for ref in right.files]


def _find_changed_keys(
    old: EpochReader, new: EpochReader, piece: _Piece, columns: dict[str, StateColumns]
) -> dict[str, pa.Array] | None:
    """Return the only keys that can differ, by state: those in files that the two do not share.

    None if one of those files is a base, which has every key.
    """
    common = 0
    for left, right in zip(piece.before, piece.after, strict=False):
        if left.id != right.id:
            break
        common += 1
    before, after = piece.before[common:], piece.after[common:]
    names = list(columns)
    if any(ref.kind == "base" for ref in (*before, *after)):
        return None
    if not all(each.is_ordered_by_arrow for each in columns.values()):
        return None
    sides = [old.keys_in(before, piece.groups, names), new.keys_in(after, piece.groups, names)]
    found: dict[str, pa.Array] = {}
    for name in names:
        keys = [side[name] for side in sides if name in side]
        if keys:
            found[name] = pa.concat_arrays(keys)
    return found


def _read(
    reader: EpochReader,
    uid: str,
    groups: range,
    columns: dict[str, StateColumns],
    keys: dict[str, pa.Array] | None,
) -> dict[str, list[pa.RecordBatch]]:
    found: dict[str, list[pa.RecordBatch]] = {name: [] for name in columns}
    names = list(columns if keys is None else keys)
    if names:
        for chunk in reader.chunks(uid, groups, names, keys):
            for name, batches in chunk.rows.items():
                found[name] += batches
    return found


def _same_rows(left: list[pa.RecordBatch], right: list[pa.RecordBatch]) -> bool:
    """True if both sides are equal at first sight. NaN never is, and is compared later."""
    if not left or not right:
        return not left and not right
    if left[0].schema != right[0].schema:
        return False
    equal: bool = pa.Table.from_batches(left).equals(pa.Table.from_batches(right))
    return equal


def _decode(
    columns: StateColumns,
    batches: list[pa.RecordBatch],
    check: Callable[[], None] = lambda: None,
) -> Held:
    found: Held = {}
    for batch in batches:
        check()
        found.update(((key, entry), value) for key, entry, value in columns.decode(batch))
    return found


def _compare(diff: StateDiff, before: Held, after: Held, limit: int) -> None:
    for name, value in after.items():
        held = before.get(name, _ABSENT)
        if held is _ABSENT:
            diff.added += 1
            _add(diff.added_examples, Example(*name, None, value), limit)
        elif not same_value(held, value):
            diff.changed += 1
            _add(diff.changed_examples, Example(*name, held, value), limit)
    for name, value in before.items():
        if name not in after:
            diff.removed += 1
            _add(diff.removed_examples, Example(*name, value, None), limit)


def _add(examples: list[Example], example: Example, limit: int) -> None:
    if len(examples) < limit:
        examples.append(example)


def same_value(left: Any, right: Any) -> bool:
    """True if stored values are equal; NaN equals itself."""
    if left == right:
        return True
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[k], right[k]) for k in left)
    return bool(left != left and right != right)
