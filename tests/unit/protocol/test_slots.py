from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cairn.protocol.slots import slots_after, slots_for


def test_slots_stay_with_the_key_groups_they_hold() -> None:
    assert slots_for([0, 1], 4, 128) == [0, 2, 1, 3]
    assert slots_for([0, 2, 1, 3], 2, 128) == [0, 1]
    assert slots_for([0, 1], 2, 128) == [0, 1]


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6))
def test_every_subtask_has_a_slot_of_its_own_after_any_rescaling(parallelisms: list[int]) -> None:
    slots = list(range(parallelisms[0]))
    for parallelism in parallelisms[1:]:
        slots = slots_for(slots, parallelism, 12)
        assert len(slots) == len(set(slots)) == parallelism


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_the_parallelisms_of_a_run_determine_its_slots(parallelisms: list[int]) -> None:
    slots = list(range(parallelisms[0]))
    for parallelism in parallelisms[1:]:
        slots = slots_for(slots, parallelism, 12)
    assert slots_after(tuple(parallelisms), 12) == tuple(slots)
