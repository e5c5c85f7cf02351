"""The rows of an epoch: base and deltas merged, of any kind and type, in bounded pieces."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cairn.snapshots.reader as reader_module
from cairn.errors import CorruptFileError, StateNotFoundError
from cairn.snapshots import EpochReader
from cairn.snapshots.reader import _are_last
from cairn.storage.manifest import Epoch
from cairn.storage.store import open_store
from tests.unit.snapshots.checkpoints import GONE, UID, Checkpoint, listed, mapped, state_of, value
from tests.unit.snapshots.savepoints import STATES


def grown(**more: Any) -> Checkpoint:
    """A few epochs with everything in them that a reader must get right."""
    checkpoint = Checkpoint(STATES, **more)
    checkpoint.commit({"n": {k: k for k in range(40)}, "items": {k: ["a"] for k in range(9)}})
    checkpoint.commit({"last": {k: {"x": 1.0, "y": None} for k in range(20)}})
    checkpoint.commit({"n": {3: GONE, 4: -4}, "items": {1: ["a", "b"], 2: GONE, 3: ["c"]}})
    checkpoint.commit({"last": {1: {"x": GONE}, 2: GONE, 3: {"z": float("inf")}}}, base=True)
    checkpoint.commit({"n": {3: 33, 5: GONE}, "items": {3: ["c", "d"]}})
    return checkpoint


def read(checkpoint: Checkpoint, epoch: Epoch | None = None) -> Any:
    found = epoch or checkpoint.newest
    assert found is not None
    with EpochReader(checkpoint.store, found) as reader:
        return state_of(reader)


def test_of_each_key_the_last_word_is_read_and_nothing_deleted() -> None:
    checkpoint = grown()
    assert 5 not in checkpoint.model["n"] and checkpoint.model["n"][3] == 33
    assert read(checkpoint) == checkpoint.model


def test_an_older_epoch_is_read_as_it_was() -> None:
    checkpoint = Checkpoint(STATES)
    seen = []
    for number in range(5):
        epoch = checkpoint.commit({"n": {number: 1, number - 1: GONE}}, base=number == 3)
        seen.append((epoch, checkpoint.model))
    for epoch, model in seen:
        assert read(checkpoint, epoch) == model


@pytest.mark.parametrize("parallelism", [1, 3, 8, 11])
def test_files_that_are_shared_after_a_rescale_count_only_for_their_groups(
    parallelism: int,
) -> None:
    checkpoint = grown(parallelism=2)
    checkpoint.parallelism = parallelism
    checkpoint.commit({"n": {6: GONE, 7: 70}})
    assert read(checkpoint) == checkpoint.model
    checkpoint.parallelism = 2
    checkpoint.commit({"n": {7: 71, 8: GONE}})
    assert read(checkpoint) == checkpoint.model


def test_rows_come_sorted_by_group_then_key_whatever_the_order_they_came_in() -> None:
    forth, back = Checkpoint(STATES), Checkpoint(STATES)
    keys = list(range(50))
    for k in keys:
        forth.commit({"n": {k: 1}})
    for k in reversed(keys):
        back.commit({"n": {k: 1}})
    rows = []
    for checkpoint in (forth, back):
        assert checkpoint.newest is not None
        reader = EpochReader(checkpoint.store, checkpoint.newest)
        rows.append([row for batch in reader.rows(UID, "n") for row in batch.to_pylist()])
    assert rows[0] == rows[1]
    order = [(row["group"], row["key"]) for row in rows[0]]
    assert order == sorted(order)


KEYS: dict[str, list[Any]] = {
    "bigint": [-5, None, 7, 0],
    "string": ["b", "", None, "☃", "é", "Z"],
    "binary": [b"\xff", None, b"", b"a"],
    "decimal(4,2)": [Decimal("1.50"), None, Decimal("-1.00")],
    "timestamp": [
        dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        None,
        dt.datetime.min.replace(tzinfo=dt.UTC),
    ],
    "date": [dt.date(2024, 1, 1), None, dt.date.min],
}


@pytest.mark.parametrize("declared", sorted(KEYS))
def test_keys_that_were_merged_and_keys_that_were_passed_on_come_in_one_order(
    declared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"n": value("int"), "m": mapped("string", "int"), "l": listed("int")}
    checkpoint = Checkpoint(states, {"k": declared}, group_count=1, parallelism=1)
    keys = KEYS[declared]
    checkpoint.commit(
        {
            "n": dict.fromkeys(keys, 1),
            "m": {key: {"z": 1, "a": 2} for key in keys},
            "l": {key: [1, 2] for key in keys},
        }
    )
    some = keys[::2]
    epoch = checkpoint.commit(
        {
            "n": dict.fromkeys(some, 2),
            "m": {key: {"b": 3, "z": GONE} for key in some},
            "l": {key: [1, 2, 3] for key in some},
        }
    )
    assert read(checkpoint) == checkpoint.model
    found = []
    for bytes_max in (reader_module.SORT_BYTES_MAX, -1):
        monkeypatch.setattr(reader_module, "SORT_BYTES_MAX", bytes_max)
        with EpochReader(checkpoint.store, epoch) as reader:
            found.append({n: list_rows(reader.rows(UID, n)) for n in states})
    assert found[0] == found[1]


def list_rows(batches: Any) -> list[Any]:
    return [row for batch in batches for row in batch.to_pylist()]


def test_columns_have_the_names_and_types_of_the_state() -> None:
    checkpoint = grown()
    assert checkpoint.newest is not None
    reader = EpochReader(checkpoint.store, checkpoint.newest)
    schemas = {name: next(reader.rows(UID, name)).schema for name in STATES}
    assert {name: str(s).split("\n") for name, s in schemas.items()} == {
        "n": ["group: int32", "key: int64", "value: int64"],
        "items": ["group: int32", "key: int64", "value: list<element: string>", *_CHILD],
        "last": ["group: int32", "key: int64", "entry: string", "value: double"],
    }


_CHILD = ["  child 0, element: string"]


def test_only_the_groups_asked_for_are_read() -> None:
    checkpoint = grown()
    assert checkpoint.newest is not None
    reader = EpochReader(checkpoint.store, checkpoint.newest)
    for groups in (range(0, 3), range(2, 7), range(7, 8), range(8, 8)):
        found = [g for batch in reader.rows(UID, "n", groups) for g in batch["group"].to_pylist()]
        assert found == sorted(
            group for group in map(checkpoint.group, checkpoint.model["n"]) if group in groups
        )


def test_a_chunk_holds_about_as_many_rows_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(STATES, group_count=64, parallelism=2)
    epoch = checkpoint.commit({"n": {k: k for k in range(6400)}})
    monkeypatch.setattr(reader_module, "CHUNK_ROWS", 500)
    with EpochReader(checkpoint.store, epoch) as reader:
        chunks = list(reader.chunks(UID))
    assert [c.groups.start for c in chunks[1:]] == [c.groups.stop for c in chunks[:-1]]
    assert (chunks[0].groups.start, chunks[-1].groups.stop) == (0, 64)
    assert max(sum(b.num_rows for b in c.rows["n"]) for c in chunks) < 1000
    assert len(chunks) > 10


def test_a_file_is_opened_once_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = grown()
    opened = []
    real = reader_module.open_rows
    monkeypatch.setattr(reader_module, "CHUNK_ROWS", 1)
    monkeypatch.setattr(
        reader_module,
        "open_rows",
        lambda store, ref, s: opened.append(ref.id) or real(store, ref, s),
    )
    assert read_chunks(checkpoint) == checkpoint.model["n"].keys()
    assert len(opened) == len(set(opened))


def read_chunks(checkpoint: Checkpoint) -> Any:
    assert checkpoint.newest is not None
    with EpochReader(checkpoint.store, checkpoint.newest) as reader:
        chunks = list(reader.chunks(UID))
    return {k for chunk in chunks for batch in chunk.rows["n"] for k in batch["key"].to_pylist()}


def test_files_of_a_branchs_parent_are_read_where_they_lie() -> None:
    checkpoint = grown()
    epoch = checkpoint.newest
    assert epoch is not None
    replace = msgspec.structs.replace
    entry = epoch.operators[UID]
    ranges = [
        replace(part, files=[replace(ref, store=checkpoint.store.url) for ref in part.files])
        for part in entry.ranges
    ]
    branch = replace(epoch, operators={UID: replace(entry, ranges=ranges)})
    with EpochReader(open_store("memory:"), branch) as reader:
        assert state_of(reader) == checkpoint.model


def test_a_state_that_never_had_rows_has_none() -> None:
    checkpoint = Checkpoint(STATES)
    epoch = checkpoint.commit()
    with EpochReader(checkpoint.store, epoch) as reader:
        assert state_of(reader) == {"n": {}, "items": {}, "last": {}}


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    checkpoint = grown()
    assert checkpoint.newest is not None
    reader = EpochReader(checkpoint.store, checkpoint.newest)
    with pytest.raises(StateNotFoundError, match="found: count"):
        list(reader.rows("counts", "n"))
    with pytest.raises(StateNotFoundError, match="found: n, items, last"):
        list(reader.rows(UID, "m"))


def test_a_missing_file_is_named() -> None:
    checkpoint = grown()
    assert checkpoint.newest is not None
    path = checkpoint.newest.operators[UID].ranges[0].files[0].path
    checkpoint.store.delete([path])
    with pytest.raises(CorruptFileError, match=path):
        read(checkpoint)


_KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)


@given(
    st.lists(st.lists(_KEYS, max_size=60, unique=True), min_size=1, max_size=5),
    st.sampled_from([pa.int64(), pa.string()]),
)
def test_of_rows_of_one_place_the_last_one_counts(
    files: list[list[int]], type: pa.DataType
) -> None:
    keys = [key for file in files for key in file]
    column = pa.array(keys if type == pa.int64() else [str(key) for key in keys], type)
    last = {key: at for at, key in enumerate(keys)}
    found = _are_last([column], [len(file) for file in files])
    assert found.tolist() == [last[key] == at for at, key in enumerate(keys)]


def test_files_may_be_more_than_a_byte_counts() -> None:
    column = pa.array([7] * 300 + [8], pa.int64())
    assert _are_last([column], [1] * 301).tolist() == [False] * 299 + [True, True]
