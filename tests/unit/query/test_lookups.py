"""Keys and values of any type, questions that are wrong, and how little of a checkpoint is read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cairn import KeyedProcess, state
from cairn.errors import QueryError, StateNotFoundError
from cairn.snapshots import reader
from cairn.types import parse_schema
from tests.unit.query.queried import EPOCHS, Everything, Queried, TypedJob

# Types


def test_keys_and_values_of_any_type_come_out_as_they_went_in(tmp_path: Path) -> None:
    job = TypedJob(tmp_path)
    for place in ("slot", "checkpoint"):
        job.led.slots.are_silent = place == "checkpoint"
        for key, value in job.rows:
            answer = job.led.live.query("op", "held", key)
            assert (answer.found, answer.source) == (True, place), key
            assert same(answer.value, value), key
        assert not job.led.live.query("op", "held", ("x", None, 0.5)).found


def same(found: Any, expected: Any) -> bool:
    """Equal, NaN to NaN."""
    return repr(found) == repr(expected)


# What is asked wrongly


def test_wrong_questions_say_what_there_is(tmp_path: Path) -> None:
    led = Queried(Everything(), tmp_path)
    led.run(rows=EPOCHS[0])
    with pytest.raises(StateNotFoundError, match="found: op"):
        led.live.query("up", "total", 1)
    with pytest.raises(StateNotFoundError, match="total"):
        led.live.query("op", "sum", 1)
    with pytest.raises(QueryError, match=r"'one' is not a key.*\n  expected: k of type bigint"):
        led.live.query("op", "total", "one")
    with pytest.raises(QueryError, match="at most"):
        led.live.query_many("op", "total", range(1_000_000))
    assert led.live.query("op", "total", (1,)) == led.live.query("op", "total", 1)
    assert led.live.query("op", "total", None).found is False


WRONG_KEYS = {
    "long": [2**70, -(2**63) - 1, "1", [1], (1, 2)],
    "int": [2**31],
    "tinyint": [200],
    "string": ["\ud800", 1, ["a"]],
    "binary": ["a"],
    "array<long>": ["a", [2**70]],
}


@pytest.mark.parametrize("ddl", WRONG_KEYS)
def test_a_key_that_does_not_fit_its_type_is_a_query_error_or_not_found(
    ddl: str, tmp_path: Path
) -> None:
    led = Queried(Plain(), tmp_path, schema=parse_schema(f"k {ddl}, v long"))
    led.run(rows=[(None, 1)])
    for led.slots.are_silent in (False, True):
        for key in WRONG_KEYS[ddl]:
            try:
                assert not led.live.query("op", "n", key).found
            except QueryError as error:
                assert "is not a key of it" in str(error)


class Plain(KeyedProcess[Any]):
    n = state.Value("long")

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(row.v)


def test_bytes_are_found_by_whatever_holds_them(tmp_path: Path) -> None:
    led = Queried(Plain(), tmp_path, schema=parse_schema("k binary, v long"))
    led.run(rows=[(b"a", 1)])
    for led.slots.are_silent in (False, True):
        for key in (b"a", bytearray(b"a"), memoryview(b"a")):
            assert led.live.query("op", "n", key).value == 1


def test_keys_that_are_arrays_are_answered_as_tuples(tmp_path: Path) -> None:
    led = Queried(Plain(), tmp_path, schema=parse_schema("k array<long>, v long"))
    led.run(rows=[([1, None], 1), ([], 2), ([3], 3)])
    for led.slots.are_silent in (False, True):
        for keys in ([[1, None], [], [3], [4]], [(1, None), (), (3,), (4,)]):
            found = led.live.query_many("op", "n", keys).values
            assert found == {(1, None): 1, (): 2, (3,): 3}


def test_keys_that_are_structs_are_found_by_tuple_or_dict(tmp_path: Path) -> None:
    led = Queried(Plain(), tmp_path, schema=parse_schema("k struct<a:long,b:string>, v long"))
    led.run(rows=[((1, "x"), 1), ((None, None), 2)])
    for led.slots.are_silent in (False, True):
        for key in ((1, "x"), {"a": 1, "b": "x"}):
            assert led.live.query("op", "n", key).value == 1
            assert led.live.query_many("op", "n", [key, (None, None), (2, "x")]).values == {
                (1, "x"): 1,
                (None, None): 2,
            }


def test_a_key_that_is_asked_for_again_and_again_is_looked_up_once(tmp_path: Path) -> None:
    led = Queried(Everything(), tmp_path)
    led.run(rows=EPOCHS[0])
    asking, asked_keys = led.live._ask, []

    def ask(asked: Any) -> Any:
        asked_keys.extend(key for each in asked.values() for key in each.keys)
        return asking(asked)

    led.live._ask = ask
    assert led.live.query_many("op", "total", [1, 2, 1, (1,), 1]).values == {1: 1, 2: 2, (1,): 1}
    assert len(asked_keys) == 2


def test_the_checkpoint_is_read_range_by_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    led = Queried(Plain(), tmp_path, parallelism=4)
    led.run(rows=[(k, k) for k in range(100)])
    opened: list[str] = []
    open_rows = reader.open_rows

    def counted(store: Any, ref: Any, folder: str) -> Any:
        opened.append(ref.id)
        return open_rows(store, ref, folder)

    monkeypatch.setattr(reader, "open_rows", counted)
    led.slots.are_silent = True
    assert len(led.live.query_many("op", "n", range(100)).values) == 100
    assert len(opened) == len(set(opened)) == 4


def test_one_who_reads_the_checkpoint_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    led = Queried(Plain(), tmp_path)
    led.run(rows=[(1, 10)])
    led.slots.are_silent = True
    together = threading.Barrier(2)
    open_rows, readers = reader.open_rows, []

    def met(store: Any, ref: Any, folder: str) -> Any:
        together.wait(5)  # One after the other they would not meet here.
        readers.append(open_rows(store, ref, folder))
        return readers[-1]

    monkeypatch.setattr(reader, "open_rows", met)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(led.live.query, "op", "n", 1) for _ in range(2)]
        assert [each.result().value for each in asked] == [10, 10]
    # Their files stay open, for one epoch.
    assert led.live.query("op", "n", 1).value == 10 and len(readers) == 2
    monkeypatch.setattr(reader, "open_rows", open_rows)
    led.run(rows=[(1, 11)])
    assert led.live.query("op", "n", 1).value == 11
    assert [each.epoch for each in led.live._readers] == [led.coordinator.committed]
    led.live.close()
    assert led.live._readers == []
