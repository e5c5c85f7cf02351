"""A base holds exactly what was there when it began, whatever comes down while it is written."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.backends import BACKENDS, BaseCancelledError
from cairn.backends.contract import ABSENT
from cairn.backends.heap import backend as heap_module
from tests.unit.backends.bases import GROUP_COUNT, Slot, no_pace, stored

CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "value": st.none() | st.text("ab", max_size=3),
    "entries": st.dictionaries(
        st.sampled_from("abcd"), st.just(ABSENT) | st.none() | st.integers(0, 9), max_size=3
    ),
    "items": st.tuples(st.integers(0, 4), st.lists(st.integers(0, 9), max_size=3)),
}
CHANGE = st.sampled_from(sorted(CHANGES)).flatmap(
    lambda name: st.tuples(st.just(name), st.integers(0, 11), CHANGES[name])
)
EPOCH = st.lists(CHANGE, max_size=6)


@pytest.fixture(params=BACKENDS)
def slot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slot]:
    slot = Slot(request.param, str(tmp_path))
    yield slot
    slot.close()


class Model:
    def __init__(self) -> None:
        self.held: dict[str, dict[int, Any]] = {name: {} for name in CHANGES}

    def change(self, name: str, key: int, change: Any) -> Any:
        """Apply a change as far as it makes sense, and say what that is."""
        held = self.held[name]
        if name == "value":
            held[key] = change
            if change is None:
                del held[key]
        elif name == "entries":
            entries = {**held.get(key, {}), **change}
            held[key] = {e: value for e, value in entries.items() if value is not ABSENT}
        else:
            start, added = change
            start = min(start, len(held.get(key, [])))
            held[key] = held.get(key, [])[:start] + added
            change = (start, list(added))
        if held.get(key) in ({}, []):
            del held[key]
        return change

    def content(self) -> dict[str, dict[int, Any]]:
        return {
            name: {key: v.copy() if hasattr(v, "copy") else v for key, v in held.items()}
            for name, held in self.held.items()
            if held
        }


@pytest.mark.parametrize("backend", BACKENDS)
@settings(suppress_health_check=list(HealthCheck))
@given(
    before=st.lists(EPOCH, max_size=3),
    meanwhile=st.lists(EPOCH, max_size=8),
    flushed=st.booleans(),
)
def test_a_base_is_the_state_at_its_beginning_whatever_is_promoted_meanwhile(
    backend: str, before: list[Any], meanwhile: list[Any], flushed: bool
) -> None:
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(heap_module, "BASE_PIECE_ROWS", 2)
        slot = Slot(backend, scratch)
        model = Model()

        def promote(epoch: list[Any]) -> None:
            for name, key, change in epoch:
                slot.change(name, key, model.change(name, key, change))

        for epoch in before:
            promote(epoch)
        if flushed and hasattr(slot.backend, "flush"):
            slot.backend.flush()
        expected = model.content()
        waiting = list(meanwhile)
        ref = slot.write(lambda: promote(waiting.pop(0)) if waiting else None)
        assert stored(slot.store, ref, scratch) == expected
        assert slot.content() == model.content()
        for epoch in waiting:
            promote(epoch)
        again = slot.write()
        assert stored(slot.store, again, scratch) == model.content() == slot.content()
        slot.close()


def test_a_base_is_written_while_another_thread_promotes(slot: Slot) -> None:
    slot.fill(4000)
    expected = slot.content()
    base = slot.backend.begin_base(slot.tables, slot.groups)
    found: list[Any] = []
    writer = threading.Thread(target=lambda: found.append(base.write(slot.target(), lambda: None)))
    writer.start()
    rounds = 0
    while writer.is_alive() or rounds < 3:
        slot.fill(4000, step=7, word=f"round {rounds} ")
        slot.change("items", rounds % 4000, (1, [5]))
        slot.change("entries", rounds % 4000, {"a": ABSENT, "new": 1})
        rounds += 1
    writer.join()
    base.close()
    assert stored(slot.store, slot.ref(found[0]), slot.scratch) == expected


def test_dropping_rows_cancels_the_base(slot: Slot) -> None:
    slot.fill(100)
    base = slot.backend.begin_base(slot.tables, slot.groups)
    slot.tables["value"].forget(slot.tables["value"].groups)
    with pytest.raises(BaseCancelledError):
        base.write(slot.target(), no_pace)
    base.close()
    base.close()
    assert "value" not in slot.content()
    assert len(slot.content()["items"]) == 100


def test_a_base_cancelled_half_way_leaves_the_state_whole(slot: Slot) -> None:
    slot.fill(3000)
    expected = slot.content()
    slot.fill(3000, word="second ")
    base = slot.backend.begin_base(slot.tables, slot.groups)
    slot.change("value", 1, "third")
    slot.change("entries", 1, {"a": ABSENT, "c": 9})
    slot.change("items", 1, (1, [7]))

    class GiveUpError(Exception):
        pass

    def pace() -> None:
        raise GiveUpError

    with pytest.raises(GiveUpError):
        base.write(slot.target(), pace)
    base.close()
    expected["value"] = {key: f"second {key}" for key in range(3000)} | {1: "third"}
    expected["entries"][1] = {"b": -1, "c": 9}
    expected["items"][1] = [1, 7]
    assert slot.content() == expected
    assert stored(slot.store, slot.write(), slot.scratch) == expected
    assert set(os.listdir(slot.scratch)) <= {"state"}, "scratch files are left"


def test_a_base_that_is_never_written_costs_nothing_later(slot: Slot) -> None:
    slot.fill(50)
    slot.backend.begin_base(slot.tables, slot.groups).close()
    slot.fill(50, word="later ")
    assert stored(slot.store, slot.write(), slot.scratch) == slot.content()


def test_only_one_base_at_a_time(slot: Slot) -> None:
    base = slot.backend.begin_base(slot.tables, slot.groups)
    with pytest.raises(AssertionError):
        slot.backend.begin_base(slot.tables, slot.groups)
    base.close()
    slot.backend.begin_base(slot.tables, slot.groups).close()


def test_an_empty_state_has_an_empty_base(slot: Slot) -> None:
    ref = slot.write()
    assert ref.rows == 0
    assert stored(slot.store, ref, slot.scratch) == {}


def test_a_base_counts_its_rows(slot: Slot) -> None:
    slot.fill(40)
    assert slot.write().rows == 40 + 40 + 80


def test_long_lists_and_large_maps_are_stored_in_pieces(slot: Slot) -> None:
    slot.change("items", 3, (0, list(range(30_000))))
    slot.change("entries", 3, {str(n): n for n in range(30_000)})
    slot.change("items", 4, (0, [1]))
    slot.write()
    slot.change("items", 3, (30_000, [7]))
    ref = slot.write()
    other = Slot("heap", slot.scratch, name="other", store=slot.store)
    from cairn.backends.files import open_rows

    with open_rows(slot.store, ref, slot.scratch) as reader:
        for name in reader.states:
            assert reader.schema(name) == slot.tables[name].layout.schema
            for batch in reader.read(name):
                other.tables[name].apply(batch)
    assert other.content() == slot.content()
    assert len(other.content()["items"][3]) == 30_001


def test_a_base_of_some_key_groups_holds_no_others(slot: Slot) -> None:
    slot.fill(100)
    base = slot.backend.begin_base(slot.tables, range(2, 5))
    ref = slot.ref(base.write(slot.target(), no_pace))
    base.close()
    expected = {
        name: {key: v for key, v in held.items() if key % GROUP_COUNT in range(2, 5)}
        for name, held in slot.content().items()
    }
    assert stored(slot.store, ref, slot.scratch) == expected
