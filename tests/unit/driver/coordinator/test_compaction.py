"""When files are written anew: rarely enough to be cheap, often enough to stay few."""

from __future__ import annotations

import random

import msgspec
import pytest

from cairn.driver.coordinator.compaction import BASE_BYTES_MIN, FAN_IN, WHOLE_BYTES_MIN, due
from cairn.driver.coordinator.ranges import advance, apply_compaction, ranges_for
from cairn.protocol.messages import Compacted, Compaction, OperatorAck
from cairn.storage.files import Kind, StateFile
from cairn.storage.manifest import EpochOperator, FileRef, Held, RangeState
from tests.unit.driver.coordinator.manifests import entry, ref

GROUPS = range(0, 8)


def deltas(count: int, tier: int = 0, groups: range = GROUPS, length: int = 100) -> list[FileRef]:
    return [ref(f"d{n}", groups, tier=tier, length=length) for n in range(count)]


def base(length: int) -> FileRef:
    return ref("b", GROUPS, kind="base", length=length)


def test_few_files_are_left_alone() -> None:
    assert due([]) is None
    assert due(deltas(FAN_IN - 1)) is None


@pytest.mark.parametrize("tier", [0, 1, 5])
def test_ten_files_of_a_tier_become_one_of_the_next(tier: int) -> None:
    assert due(deltas(FAN_IN, tier)) == Compaction("merge", FAN_IN, tier + 1)
    assert due([*deltas(3, tier + 1), *deltas(FAN_IN, tier)]) == (
        Compaction("merge", FAN_IN, tier + 1)
    )


def test_files_of_different_tiers_are_not_merged() -> None:
    assert due([*deltas(5, 1), *deltas(FAN_IN - 1, 0)]) is None


def test_a_full_tier_is_merged_though_smaller_files_follow_it() -> None:
    assert due([*deltas(FAN_IN, 1), *deltas(1, 0)]) == Compaction("merge", FAN_IN + 1, 2)
    assert due([*deltas(2, 3), *deltas(FAN_IN, 2), *deltas(4, 1), *deltas(FAN_IN, 0)]) == (
        Compaction("merge", 2 * FAN_IN + 4, 3)
    )


def test_a_base_is_not_merged_with_deltas() -> None:
    assert due([base(10**9), *deltas(FAN_IN - 1)]) is None


def test_files_left_by_rescales_are_merged_with_others() -> None:
    clipped = [*deltas(4, groups=range(0, 4)), *deltas(6, groups=range(0, 8))]
    assert due(clipped) == Compaction("merge", FAN_IN, 1)
    united = [*deltas(3, 1, range(0, 4)), *deltas(4, 0, range(0, 4)), *deltas(3, 1, range(4, 8))]
    assert due([*united, *deltas(4, 0, range(4, 8))]) == Compaction("merge", 14, 2)


def test_a_base_is_due_when_deltas_outgrow_it() -> None:
    grown = deltas(2, length=BASE_BYTES_MIN // 2 + 1)
    assert due(grown) == Compaction("base", 2, 0)
    assert due([base(BASE_BYTES_MIN), *grown]) is None
    assert due([base(BASE_BYTES_MIN // 8), *grown]) == Compaction("base", 3, 0)


def test_a_large_first_delta_is_not_written_once_more_as_a_base() -> None:
    large = deltas(1, length=WHOLE_BYTES_MIN)
    assert due(large) is None
    assert due([*large, *deltas(4, length=WHOLE_BYTES_MIN)]) is None
    assert due([*large, *deltas(5, length=WHOLE_BYTES_MIN)]) == Compaction("base", 6, 0)
    assert due([*large, *deltas(FAN_IN)]) == Compaction("merge", FAN_IN, 1)
    # A base in RocksDB costs less: later ones share its files.
    assert due([*large, *deltas(1)], "rocksdb") == Compaction("base", 2, 0)


def test_a_small_state_needs_no_base() -> None:
    assert due([base(10), *deltas(3, length=1000)]) is None


@pytest.mark.parametrize(("rescale_every", "files_max"), [(None, 40), (7, 160), (100, 160)])
def test_a_range_has_few_files_however_old_the_job_is(
    rescale_every: int | None, files_max: int
) -> None:
    chance = random.Random(1)
    held: EpochOperator | None = None
    parallelism = 2
    written = rewritten = 0
    for epoch in range(1, 1500):
        if rescale_every and epoch % rescale_every == 0:
            parallelism = chance.choice([1, 2, 3, 4])
        parts = ranges_for(held, parallelism, 12)
        known = [] if held is None else [(r.first_group, r.group_count) for r in held.ranges]
        after = []
        for subtask, each in enumerate(parts):
            compaction = due(each.files)
            if compaction is not None and (each.first_group, each.group_count) not in known:
                compaction = compaction if compaction.kind == "base" else None
            if compaction is not None:
                file = compacted(f"c{epoch}-{subtask}", compaction, each, epoch - 1)
                each = apply_compaction(each, file) or each
                rewritten += file.stored.length
            delta = StateFile(
                f"{epoch}-{subtask}", "delta", chance.randrange(1, 20_000), 1, path="d"
            )
            after.append(advance(each, OperatorAck("op", 1, 1, 1, delta), epoch, Held(1, 1)))
            written += delta.length
        held = entry(*after)
        assert max(len(each.files) for each in after) <= files_max
    assert rewritten < 8 * written


def compacted(name: str, compaction: Compaction, part: RangeState, as_of: int) -> Compacted:
    replaced = part.files[-compaction.count :]
    kind: Kind = "base" if compaction.kind == "base" else "delta"
    size = 1_000_000 if compaction.kind == "base" else sum(r.length for r in replaced)
    return Compacted(
        uid="op",
        first_group=part.first_group,
        group_count=part.group_count,
        kind=compaction.kind,
        tier=compaction.tier,
        as_of=as_of,
        replaced=tuple(ref.listing for ref in replaced),
        stored=StateFile(name, kind, size, 1, path=name),
        ms=1.0,
    )


def test_rocksdb_writes_bases_sooner_because_they_cost_less() -> None:
    whole = base(8 * BASE_BYTES_MIN)
    shared = msgspec.structs.replace(whole, format="rocksdb")
    more = deltas(2, length=3 * BASE_BYTES_MIN)
    assert due([whole, *more], "heap") is None
    assert due([shared, *more], "rocksdb") == Compaction("base", 3, 0)


def test_state_in_memory_has_bases_as_rarely_with_rocksdb_as_on_the_heap() -> None:
    whole = base(8 * BASE_BYTES_MIN)
    assert due([whole, *deltas(2, length=3 * BASE_BYTES_MIN)], "rocksdb") is None
    assert due([whole, *deltas(2, length=17 * BASE_BYTES_MIN)], "rocksdb") is not None


def test_state_in_a_database_has_bases_in_place_of_merges() -> None:
    external = msgspec.structs.replace(base(1000), format="postgres")
    few = deltas(FAN_IN - 1, length=1)
    assert due([external, *few], "postgresql://host/db") is None
    full = [external, *deltas(FAN_IN, length=1)]
    assert due(full, "postgresql://host/db") == Compaction("base", FAN_IN + 1, 0)
    more = [external, *deltas(1, length=BASE_BYTES_MIN + 1)]
    assert due(more, "postgresql://host/db") == Compaction("base", 2, 0)
