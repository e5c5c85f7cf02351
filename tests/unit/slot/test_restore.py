"""State comes back from files: of its own key groups, whatever wrote them and however merged."""

from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cairn import KeyedProcess, state
from cairn.errors import CorruptFileError, RestoreError
from cairn.protocol.messages import Begin, Compaction
from cairn.slot.operator import Operator
from cairn.slot.restore import base_work, merge_work, restore
from cairn.storage.files import StateFile, open_segment
from cairn.storage.manifest import Epoch
from tests.backends import MORE_IN_SOAK
from tests.restored import fresh_operator
from tests.stored_harness import StoredHarness
from tests.unit.slot.one_level import (
    GROUP_COUNT,
    Checkpoint,
    group_of,
    held,
    model,
    token_of,
)

Rows = list[tuple[int, int | None]]


def fresh(checkpoint: Checkpoint, groups: range) -> Operator:
    return fresh_operator(checkpoint.spec.levels[0].operators[0], groups, GROUP_COUNT)


def restore_all(operator: Operator, checkpoint: Checkpoint, epoch: Epoch, scratch: Path) -> None:
    store = checkpoint.store
    epoch = checkpoint.log.epoch(epoch.number)
    restore(operator.state, store, epoch, [operator.state.groups], str(scratch))


def keys_of(operator: Operator) -> set[Any]:
    return {key for table in operator.tables.values() for rows in table.rows for key in rows}


def files_of(epoch: Epoch) -> list[Any]:
    return [ref for part in epoch.operators["count"].ranges for ref in part.files]


def some_compaction(checkpoint: Checkpoint, chance: random.Random) -> Compaction | None:
    """One that every subtask can do: a base of all its files, or a merge of the last few."""
    counts = {len(part.files) for part in checkpoint.ranges()}
    parent = checkpoint.newest
    if parent is None or 0 in counts or chance.random() < 0.4:
        return None
    if len(counts) == 1 and chance.random() < 0.4:
        return Compaction("base", counts.pop(), 0)
    # A merge reads the files of the very range, so not right after a rescale.
    is_same = parent.operators["count"].parallelism == checkpoint.parallelism
    if not is_same or min(counts) < 2:
        return None
    return Compaction("merge", chance.randrange(2, min(counts) + 1), 1)


@pytest.mark.parametrize("seed", range(6))
def test_state_survives_every_change_of_parallelism_with_compactions_between(
    seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    checkpoint = Checkpoint()
    done: Rows = []
    for parallelism in (2, 3, 1, 5, 6, 2):
        checkpoint.parallelism = parallelism
        slots = [checkpoint.slot(tmp_path) for _ in range(parallelism)]
        for _ in range(chance.randrange(1, 5)):
            rows: Rows = [
                (chance.randrange(25), chance.choice([None, *range(5)]))
                for _ in range(chance.choice([0, 1, 20]))
            ]
            compaction = some_compaction(checkpoint, chance)
            checkpoint.run_batch(slots, rows, compaction)
            done += rows
        begin = checkpoint.begin()
        fresh_slots = [checkpoint.slot(tmp_path) for _ in range(parallelism)]
        for subtask, slot in enumerate(fresh_slots):
            slot.begin(token_of(begin), begin, subtask)
        assert held(fresh_slots) == model(done)


def test_only_the_owned_key_groups_are_restored(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    epoch = checkpoint.run_batch([checkpoint.slot(tmp_path)], [(k, 1) for k in range(40)])
    for groups in (range(0, 2), range(2, 5), range(3, 3), range(0, GROUP_COUNT)):
        operator = fresh(checkpoint, groups)
        restore_all(operator, checkpoint, epoch, tmp_path)
        assert keys_of(operator) == {k for k in range(40) if group_of(k) in groups}


def test_a_base_and_the_deltas_after_it_give_the_state(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    slot = checkpoint.slot(tmp_path)
    done: Rows = []
    for n in range(6):
        rows: Rows = [(k, n) for k in range(5)] + [(n, None)]
        compaction = Compaction("base", 3, 0) if n == 3 else None
        epoch = checkpoint.run_batch([slot], rows, compaction)
        done += rows
    assert [ref.kind for ref in files_of(epoch)] == ["base", "delta", "delta", "delta"]
    fresh_slot = checkpoint.slot(tmp_path)
    fresh_slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert held([fresh_slot]) == model(done)


def test_a_base_holds_nothing_of_the_running_epoch(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    slot = checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 1)])
    epoch = checkpoint.run_batch([slot], [(1, 2), (2, 2)], Compaction("base", 1, 0))
    base, delta = files_of(epoch)
    assert (base.kind, base.rows) == ("base", 3)
    assert (delta.kind, delta.first_epoch) == ("delta", epoch.number)


def test_a_small_base_travels_and_a_large_one_is_stored(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    slot = checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(k, k) for k in range(50)])
    begin = checkpoint.begin()
    slot.begin(token_of(begin), begin, 0)
    operator = slot.operators[0]

    def written(begin: Begin) -> StateFile:
        work = base_work(operator.state, checkpoint.store, begin, str(tmp_path))
        compacted = work.run(lambda: None)
        work.close()
        assert compacted is not None
        return compacted.stored

    small = written(begin)
    assert small.data is not None and small.path is None
    large = written(checkpoint.begin(inline_bytes_max=0))
    assert large.path is not None and large.data is None
    assert large.id == small.id
    assert checkpoint.store.get(large.path) == small.data
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_base_of_no_state_is_a_file_without_rows(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    slot = checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 1)])
    checkpoint.run_batch([slot], [(1, None)])
    epoch = checkpoint.run_batch([slot], [], Compaction("base", 2, 0))
    (base,) = files_of(epoch)
    assert base.rows == 0
    assert open_segment(checkpoint.store, base).states == []
    epoch = checkpoint.run_batch([slot], [(1, 5)])
    fresh_slot = checkpoint.slot(tmp_path)
    fresh_slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert held([fresh_slot]) == model([(1, 5)])


def test_a_merge_keeps_the_version_and_the_files_before_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    slot = checkpoint.slot(tmp_path)
    done: Rows = []
    for n in range(5):
        epoch = checkpoint.run_batch([slot], [(k, n) for k in range(n + 1)])
        done += [(k, n) for k in range(n + 1)]
    merged = checkpoint.run_batch([slot], [], Compaction("merge", 3, 1))
    assert merged.operators["count"].ranges[0].version == epoch.operators["count"].ranges[0].version
    assert files_of(merged)[:2] == files_of(epoch)[:2]
    assert len(files_of(merged)) == 3
    last = files_of(merged)[2]
    assert (last.tier, last.first_epoch, last.last_epoch) == (
        1,
        files_of(epoch)[2].first_epoch,
        epoch.number,
    )
    fresh_slot = checkpoint.slot(tmp_path)
    fresh_slot.begin(token_of(checkpoint.begin()), checkpoint.begin(), 0)
    assert held([fresh_slot]) == model(done)


def test_a_merge_of_a_range_the_parent_does_not_have_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    slot = checkpoint.slot(tmp_path)
    checkpoint.run_batch([slot], [(1, 1)])
    checkpoint.run_batch([slot], [(1, 1)])
    checkpoint.parallelism = 2
    operator = fresh(checkpoint, range(0, 3))
    work = merge_work(
        operator.state,
        Compaction("merge", 2, 1),
        checkpoint.store,
        checkpoint.begin(),
        str(tmp_path),
    )
    with pytest.raises(RestoreError, match="no range"):
        work.run(lambda: None)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    epoch = checkpoint.run_batch([checkpoint.slot(tmp_path)], [(k, k) for k in range(9)])
    (ref,) = files_of(epoch)
    data = bytearray(checkpoint.store.get(ref.path))
    data[40] ^= 1
    checkpoint.store.put(ref.path, bytes(data))
    with pytest.raises(CorruptFileError, match="damaged") as caught:
        restore_all(fresh(checkpoint, range(GROUP_COUNT)), checkpoint, epoch, tmp_path)
    assert ref.path in str(caught.value)


def test_state_that_is_no_longer_declared_is_left_out(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    epoch = checkpoint.run_batch([checkpoint.slot(tmp_path)], [(1, 1)])
    operator = fresh(checkpoint, range(GROUP_COUNT))
    del operator.tables["values"]
    restore_all(operator, checkpoint, epoch, tmp_path)
    assert operator.state.state_held().entries == 2


def test_an_operator_the_epoch_does_not_know_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    epoch = checkpoint.run_batch([checkpoint.slot(tmp_path)], [(1, 1)])
    operator = fresh(checkpoint, range(GROUP_COUNT))
    operator.state.uid = "other"
    with pytest.raises(RestoreError, match="no operator 'other'"):
        restore_all(operator, checkpoint, epoch, tmp_path)


class Owed(KeyedProcess[Any]):
    """Stores amounts, and emits the state as text: with sign and exponent."""

    owed = state.Value("decimal(10,2)")
    paid = state.List("decimal(10,2)")
    by_day = state.Map("decimal(4,1)", "decimal(10,2)")

    def process(self, row: Any, ctx: Any) -> Any:
        amount = Decimal(row.text)
        if row.is_set:
            self.owed.set(amount)
            self.paid.append(amount)
            self.by_day[Decimal("-0.0")] = amount
        return (str([self.owed.get(), *self.paid, *self.by_day.items()]),)


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@pytest.mark.parametrize("text", ["-0.00", "0E-5", "-0.004", "-12.30", "1E+2"])
def test_a_decimal_has_the_same_sign_and_exponent_after_a_restore(text: str, backend: str) -> None:
    schema = "k long, text string, is_set boolean"
    with StoredHarness(Owed(), schema, "k", "seen string", backend=backend) as harness:
        written = harness.push((1, text, True))
        harness.commit()
        for base in (False, True):
            assert harness.push((1, "0", False)) == written
            harness.snapshot_and_restore(base=base)
            assert harness.push((1, "0", False)) == written
