"""Ranges of key groups: disjoint, complete, and cut without rewriting a file."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.driver.coordinator.ranges import advance, apply_compaction, ranges_for
from cairn.driver.coordinator.record import pack_small_files
from cairn.driver.coordinator.rounds import Outcome
from cairn.key_groups import starts_within
from cairn.protocol.messages import Ack, Compacted, OperatorAck
from cairn.storage.files import StateFile
from cairn.storage.manifest import EMPTY_VERSION, Held, RangeState, next_version
from cairn.storage.store import open_store
from tests.unit.driver.coordinator.manifests import entry, part, ref


def groups(part: RangeState) -> range:
    return range(part.first_group, part.first_group + part.group_count)


def ack(delta: StateFile | None = None) -> OperatorAck:
    return OperatorAck("op", 1, 1, 1, delta)


STORED = StateFile("new", "delta", 50, 5, path="state/new")


@given(st.integers(1, 40), st.lists(st.integers(1, 45), max_size=5))
def test_ranges_cover_every_key_group_once_after_any_rescaling(
    group_count: int, parallelisms: list[int]
) -> None:
    held = None
    for parallelism in [3, *parallelisms]:
        parts = ranges_for(held, parallelism, group_count)
        assert len(parts) == parallelism
        assert [g for each in parts for g in groups(each)] == list(range(group_count))
        held = entry(
            *(
                part(groups(each), *each.files, ref(f"f{at}", groups(each)), version=each.version)
                for at, each in enumerate(parts)
            )
        )


def test_the_first_epoch_starts_from_empty_ranges() -> None:
    parts = ranges_for(None, 3, 8)
    assert [groups(each) for each in parts] == [range(0, 3), range(3, 6), range(6, 8)]
    assert {each.version for each in parts} == {EMPTY_VERSION}
    assert all(each.files == [] for each in parts)


def test_the_same_parallelism_keeps_ranges_and_versions() -> None:
    held = entry(part(range(0, 4), ref("a", range(0, 4))), part(range(4, 8)))
    assert ranges_for(held, 2, 8) == held.ranges


def test_a_split_lists_the_file_for_both_halves() -> None:
    whole = part(range(0, 8), ref("a", range(0, 8)), ref("b", range(0, 8)), keys=80, size=800)
    left, right = ranges_for(entry(whole), 2, 8)
    for half, owned in ((left, range(0, 4)), (right, range(4, 8))):
        assert [(r.id, r.first_group, r.group_count) for r in half.files] == [
            ("a", owned.start, 4),
            ("b", owned.start, 4),
        ]
        assert (half.state_keys, half.state_bytes) == (40, 400)
    assert len({left.version, right.version, whole.version}) == 3


def test_a_merge_lists_the_files_of_both_each_for_its_own_groups() -> None:
    left = part(range(0, 4), ref("a", range(0, 4)), keys=1)
    right = part(range(4, 8), ref("b", range(4, 8)), keys=2)
    (whole,) = ranges_for(entry(left, right), 1, 8)
    assert [(r.id, r.first_group, r.group_count) for r in whole.files] == [
        ("a", 0, 4),
        ("b", 4, 4),
    ]
    assert whole.state_keys == 3


def test_a_file_clipped_before_is_clipped_again_and_never_grows() -> None:
    clipped = part(range(0, 8), ref("a", range(1, 3)))
    cut = ranges_for(entry(clipped), 4, 8)
    assert [[(r.first_group, r.group_count) for r in each.files] for each in cut] == [
        [(1, 1)], [(2, 1)], [], [],
    ]  # fmt: skip


def test_versions_of_cut_ranges_differ_when_the_content_differs() -> None:
    first = ranges_for(entry(part(range(0, 8), ref("a", range(8)), version="x")), 2, 8)
    same = ranges_for(entry(part(range(0, 8), ref("b", range(8)), version="x")), 2, 8)
    other = ranges_for(entry(part(range(0, 8), ref("a", range(8)), version="y")), 2, 8)
    assert [p.version for p in first] == [p.version for p in same]
    assert not {p.version for p in first} & {p.version for p in other}


def test_empty_ranges_stay_empty_when_they_are_cut() -> None:
    cut = ranges_for(entry(part(range(0, 4)), part(range(4, 8))), 3, 8)
    assert {each.version for each in cut} == {EMPTY_VERSION}


def test_more_subtasks_than_key_groups_leaves_some_with_none() -> None:
    parts = ranges_for(entry(part(range(0, 3), ref("a", range(0, 3)))), 7, 3)
    sizes = [each.group_count for each in parts]
    assert sorted(sizes) == [0, 0, 0, 0, 1, 1, 1]
    assert all(not each.files for each in parts if not each.group_count)
    again = ranges_for(entry(*parts), 2, 3)
    assert [g for each in again for g in groups(each)] == [0, 1, 2]


# Advancing


def test_an_epoch_without_a_delta_changes_neither_version_nor_files() -> None:
    before = part(range(0, 4), ref("a", range(0, 4)))
    after = advance(before, ack(), 2, Held(5, 7))
    assert (after.version, after.files) == (before.version, before.files)
    assert (after.state_keys, after.state_entries) == (5, 7)


def test_a_delta_is_added_and_names_the_version() -> None:
    before = part(range(0, 4), ref("a", range(0, 4)))
    after = advance(before, ack(STORED), 2)
    assert [r.id for r in after.files] == ["a", "new"]
    added = after.files[-1]
    assert (added.kind, added.tier, added.first_epoch, added.last_epoch) == ("delta", 0, 2, 2)
    assert (added.first_group, added.group_count) == (0, 4)
    assert after.version == next_version(before.version, "new")


def test_a_delta_that_travelled_is_found_in_its_pack() -> None:
    store = open_store("memory:")
    sent = [StateFile(id, "delta", 3, 5, data=id.encode() * 3) for id in "ba"]
    outcome = Outcome([Ack(0, n, [ack(file)], {}) for n, file in enumerate(sent)], [])
    (packed,), _ = pack_small_files(store, [outcome], [], term=7)
    deltas = [op.delta for acked in packed.acks for op in acked.operators]
    for file, delta in zip(sent, deltas, strict=True):
        after = advance(part(range(0, 4)), ack(delta), 2)
        (found,) = after.files
        assert store.get_range(found.path, found.offset, found.length) == file.data
        assert delta is not None and delta.data is None


def test_a_delta_that_another_subtask_stores_is_not_placed_and_counts_no_bytes() -> None:
    written = StateFile("x", "delta", 3, 5, data=b"xxx")
    same = StateFile("x", "delta", 0, 0)
    outcome = Outcome([Ack(0, n, [ack(file)], {}) for n, file in enumerate((written, same))], [])
    (packed,), _ = pack_small_files(open_store("memory:"), [outcome], [], term=7)
    assert packed.acks[1].operators[0].delta == same


def written(kind: str, part: RangeState, as_of: int, *replaced: str) -> Compacted:
    return Compacted(
        uid="op",
        first_group=part.first_group,
        group_count=part.group_count,
        kind="base" if kind == "base" else "merge",
        tier=0 if kind == "base" else 3,
        as_of=as_of,
        replaced=tuple(f"{id}:{part.first_group}+{part.group_count}" for id in replaced),
        stored=StateFile("m", "base" if kind == "base" else "delta", 9, 9, path="state/m"),
        ms=1.0,
    )


def four_deltas() -> RangeState:
    files = [ref(n, range(0, 4), first_epoch=at, last_epoch=at) for at, n in enumerate("abcd", 1)]
    return part(range(0, 4), *files)


def test_a_merge_takes_the_place_of_what_it_replaces_and_keeps_the_version() -> None:
    before = four_deltas()
    after = apply_compaction(before, written("merge", before, 4, "b", "c"))
    assert after is not None
    assert [r.id for r in after.files] == ["a", "m", "d"]
    merged = after.files[1]
    assert (merged.kind, merged.tier) == ("delta", 3)
    assert (merged.first_epoch, merged.last_epoch) == (2, 3)
    assert after.version == before.version


def test_a_merge_takes_the_place_of_files_as_they_are_listed_not_of_their_namesakes() -> None:
    """Ranges that became one list the files of before, each for its own key groups."""
    names = "abc"
    left = [ref(name, range(0, 1)) for name in names]
    right = [ref(name, range(1, 2)) for name in names]
    before = part(range(0, 2), *left, *right)
    merged = msgspec.structs.replace(
        written("merge", before, 4), replaced=tuple(each.listing for each in right)
    )
    after = apply_compaction(before, merged)
    assert after is not None
    assert after.files[:3] == left and [each.id for each in after.files[3:]] == ["m"]


def test_a_base_replaces_what_came_up_to_its_epoch_and_keeps_what_came_later() -> None:
    before = four_deltas()
    after = apply_compaction(before, written("base", before, 3))
    assert after is not None
    assert [r.id for r in after.files] == ["m", "d"]
    assert (after.files[0].kind, after.files[0].last_epoch) == ("base", 3)
    assert after.version == before.version


def test_a_file_merged_across_the_epoch_of_a_base_stays_after_it() -> None:
    before = four_deltas()
    across = apply_compaction(before, written("merge", before, 4, "c", "d"))
    assert across is not None
    base = msgspec.structs.replace(
        written("base", before, 3), stored=StateFile("base", "base", 9, 9, path="b")
    )
    after = apply_compaction(across, base)
    assert after is not None
    assert [r.id for r in after.files] == ["base", "m"]


@pytest.mark.parametrize(
    "file",
    [
        written("merge", four_deltas(), 4, "b", "x"),
        written("merge", four_deltas(), 4, "b", "d"),
        written("base", part(range(0, 2)), 3),
    ],
    ids=["a file is gone", "not next to each other", "another range"],
)
def test_what_no_longer_fits_is_not_taken_in(file: Compacted) -> None:
    assert apply_compaction(four_deltas(), file) is None


def test_a_base_older_than_the_one_there_is_not_taken_in() -> None:
    newer = part(range(0, 4), ref("b", range(0, 4), kind="base", first_epoch=1, last_epoch=9))
    assert apply_compaction(newer, written("base", newer, 8)) is None


def test_a_file_is_taken_in_once() -> None:
    before = four_deltas()
    after = apply_compaction(before, written("base", before, 3))
    assert after is not None
    assert apply_compaction(after, written("base", after, 3)) is None


def test_an_operator_in_fewer_subtasks_has_all_key_groups_in_the_first_ones() -> None:
    bounded = starts_within(2, 4, 10, (0, 1, 2, 3))
    parts = ranges_for(None, 4, 10, bounded)
    assert [groups(each) for each in parts] == [
        range(5),
        range(5, 10),
        range(10, 10),
        range(10, 10),
    ]
    assert starts_within(4, 4, 10, (0, 1, 2, 3)) == (0, 1, 2, 3), "a bound that does not bind"
    assert starts_within(0, 4, 10) == ()


def test_another_bound_moves_files_between_subtasks_and_rewrites_none() -> None:
    held = entry(part(range(10), ref("base", range(10))), part(range(10, 10)))
    wider = ranges_for(held, 2, 10)
    assert [groups(each) for each in wider] == [range(5), range(5, 10)]
    assert [[file.id for file in each.files] for each in wider] == [["base"], ["base"]]
    assert ranges_for(held, 2, 10, starts_within(1, 2, 10)) == held.ranges
