"""What Spark's workers do for read_state and diff_state, with Spark played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cairn
import cairn.query.reader as reader_module
from cairn import KeyedProcess, PlanError, QueryError, StaleEpochError, StateNotFoundError, state
from cairn.snapshots import write_savepoint
from cairn.snapshots.tables import open_state
from cairn.storage.store import open_store
from cairn.testing import Harness
from cairn.types import parse_schema
from tests.unit.snapshots.checkpoints import GONE, UID, Checkpoint, listed, mapped, value

STATES = {"n": value("bigint"), "items": listed("string"), "last": mapped("string", "double")}


class Frame:
    """What mapInArrow gives: each partition read by a worker of its own."""

    def __init__(self, parts: int, read: Any, ddl: str) -> None:
        self.parts = parts
        self._read = cloudpickle.dumps(read)
        self.schema = parse_schema(ddl)

    def selectExpr(self, *columns: str) -> Frame:
        self.selected = columns
        return self

    def collect(self) -> list[dict[str, Any]]:
        return [row for number in range(self.parts) for row in self.partition(number)]

    def partition(self, number: int) -> list[dict[str, Any]]:
        read = cloudpickle.loads(self._read)
        batches = list(read(iter([pa.record_batch({"id": [number]})])))
        for batch in batches:
            assert parse_schema(batch.schema).types == self.schema.types
            assert batch.schema.names == self.schema.names
        return [row for batch in batches for row in batch.to_pylist()]


class Spark:
    sparkContext = SimpleNamespace(defaultParallelism=2)  # noqa: N815

    def range(self, start: int, end: int, step: int, parts: int) -> Any:
        assert (start, step, end) == (0, 1, parts)
        return SimpleNamespace(mapInArrow=lambda read, ddl: Frame(parts, read, ddl))


SPARK: Any = Spark()


def read(at: str, name: str, **more: Any) -> Any:
    return cairn.read_state(SPARK, at, UID, name, **more)


def grown(**more: Any) -> Checkpoint:
    checkpoint = Checkpoint(STATES, group_count=32, **more)
    checkpoint.commit({"n": {k: k for k in range(400)}, "items": {k: ["a"] for k in range(9)}})
    checkpoint.commit({"last": {k: {"x": 1.0, "y": None} for k in range(20)}}, base=True)
    checkpoint.commit({"n": {3: GONE, 4: -4}, "items": {1: ["a", "b"], 2: GONE}})
    return checkpoint


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(map(repr, rows))


@pytest.mark.parametrize("name", sorted(STATES))
def test_workers_read_all_rows_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = grown()
    write_savepoint(checkpoint.store, None, str(tmp_path / "saved"))
    with open_state(checkpoint.store) as source:
        table = source.table(UID, name)
        # Spark finds the group of a key by itself.
        batches = [batch.drop_columns("key_group") for batch in table.batches()]
        rows = [row for batch in batches for row in batch.to_pylist()]
    for place in (checkpoint.store.url, str(tmp_path / "saved")):
        frame = read(place, name)
        assert in_order(frame.collect()) == in_order(rows)
        assert [each.rpartition(" AS ")[2] for each in frame.selected] == [
            f"`{each}`" for each in table.schema.names
        ]
    if name == "n":
        frame = read(checkpoint.store.url, name)
        sizes = [len(frame.partition(number)) for number in range(frame.parts)]
        assert frame.parts == 2 and max(sizes) < 2 * min(sizes)
        monkeypatch.setattr(reader_module, "PARTITION_ROWS", 70)
        frame = read(checkpoint.store.url, name)
        sizes = [len(frame.partition(number)) for number in range(frame.parts)]
        assert frame.parts == 8 and sum(sizes) == len(rows) and min(sizes) > 0


def test_the_epoch_is_fixed_when_the_frame_is_made() -> None:
    checkpoint = grown(keep=1)
    frame = read(checkpoint.store.url, "n")
    expected = dict(checkpoint.model["n"])
    for number in range(40):
        checkpoint.commit({"n": dict.fromkeys(range(50), number)}, base=number % 3 == 0)
        checkpoint.collector.after_epoch()
    assert {row["k"]: row["value"] for row in frame.collect()} == expected


def test_a_worker_whose_epoch_is_gone_says_so() -> None:
    checkpoint = grown(keep=1)
    frame = read(checkpoint.store.url, "n")
    checkpoint.store.delete([hold.path for hold in checkpoint.store.list("holds")])
    for number in range(40):
        checkpoint.commit({"n": dict.fromkeys(range(50), number)}, base=number % 3 == 0)
        checkpoint.collector.after_epoch()
    with pytest.raises(StaleEpochError, match=r"retired[\s\S]*next:"):
        frame.collect()


def test_the_hold_lasts_as_long_as_was_asked_and_none_is_left_after_an_error() -> None:
    checkpoint = grown()
    with pytest.raises(PlanError, match="hold must be a span of time"):
        read(checkpoint.store.url, "n", hold="soon")
    with pytest.raises(StateNotFoundError):
        read(checkpoint.store.url, "nope")
    assert not checkpoint.store.list("holds")
    read(checkpoint.store.url, "n", hold="2 days")
    assert len(checkpoint.store.list("holds")) == 1
    reader_module._let_go()
    assert not checkpoint.store.list("holds"), "as the process does at its end"


@pytest.mark.parametrize(("name", "epoch"), [("nope", 4), ("n", 99)])
def test_a_difference_that_cannot_be_told_leaves_no_hold(name: str, epoch: int) -> None:
    checkpoint = grown()
    with pytest.raises(QueryError):
        cairn.diff_state(SPARK, checkpoint.store.url, UID, name, 3, epoch)
    assert not checkpoint.store.list("holds")


@given(st.data())
def test_a_difference_applied_to_the_first_epoch_gives_the_second(data: st.DataObject) -> None:
    checkpoint = Checkpoint({"n": value("bigint"), "m": mapped("string", "bigint")}, group_count=4)
    words = st.one_of(st.just(GONE), st.integers(0, 3))
    numbers, models = [], []
    for _ in range(data.draw(st.integers(2, 5))):
        changes = data.draw(st.dictionaries(st.integers(0, 9), words, max_size=6))
        entries = {k: {"e": v, "f": 1} for k, v in changes.items()}
        epoch = checkpoint.commit({"n": changes, "m": entries}, base=data.draw(st.booleans()))
        numbers.append(epoch.number)
        models.append(checkpoint.model)
    a, b = data.draw(st.tuples(*[st.integers(0, len(numbers) - 1)] * 2))
    url = checkpoint.store.url
    diff = cairn.diff_state(SPARK, url, UID, "n", numbers[a], numbers[b]).collect()
    before = dict(models[a]["n"])
    for row in diff:
        assert before.get(row["k"]) == row["before"] != row["after"]
        told = {"added": row["before"] is None, "removed": row["after"] is None, "changed": True}
        assert told[row["change"]]
        before[row["k"]] = row["after"]
    assert {k: v for k, v in before.items() if v is not None} == models[b]["n"]
    entries = cairn.diff_state(SPARK, url, UID, "m", numbers[a], numbers[b]).collect()
    held = {(k, e): v for k, of in models[a]["m"].items() for e, v in of.items()}
    for row in entries:
        held[row["k"], row["entry"]] = row["after"]
    after = {(k, e): v for k, of in models[b]["m"].items() for e, v in of.items()}
    assert {place: v for place, v in held.items() if v is not None} == after


def test_lists_are_compared_whole_and_keys_named_like_ours_are_renamed() -> None:
    checkpoint = Checkpoint({"l": listed("int")}, {"before": "bigint", "value": "string"})
    first = checkpoint.commit({"l": {(1, "x"): [1], (2, "x"): [5]}})
    second = checkpoint.commit({"l": {(1, "x"): [1, 2], (2, "x"): GONE}})
    url = checkpoint.store.url
    diff = cairn.diff_state(SPARK, url, UID, "l", first.number, second.number)
    assert diff.schema.names == ["change", "key_before", "value", "before", "after"]
    assert {row["change"]: (row["before"], row["after"]) for row in diff.collect()} == {
        "changed": ([1], [1, 2]),
        "removed": ([5], None),
    }


class Reminded(KeyedProcess[Any]):
    seen = state.Value("bigint", ttl="1 hour")

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.set(row.v)
        ctx.timers.processing(row.v * 1000)
        return []

    def on_timer(self, timer: Any, ctx: Any) -> Any:
        return []


def test_timers_and_what_expires_differ_like_any_other_state() -> None:
    with Harness(Reminded(), "k string, v bigint", "k", "x int") as harness:
        harness.push([("a", 90_000)])
        harness.commit()
        first = harness.epoch - 1
        harness.clock.advance_ms(2 * 3_600_000)
        harness.push([("b", 90_001)])
        harness.commit()
        second = harness.epoch - 1
        url = harness._checkpoint._store.url
        with open_state(url) as source:
            (uid, *_) = (table.operator for table in source.tables())
        told = cairn.diff_state(SPARK, url, uid, "timers.processing", first, second).collect()
        assert [(row["change"], row["k"], row["time"].timestamp()) for row in told] == [
            ("added", "b", 90_001.0)
        ]
        seen = cairn.diff_state(SPARK, url, uid, "seen", first, second).collect()
        assert {(row["change"], row["k"]) for row in seen} == {("added", "b"), ("removed", "a")}


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint({"n": value("bigint")}, store=open_store(str(tmp_path / "ckpt")))
    first = checkpoint.commit({"n": {1: 1}}).number
    checkpoint.states = {"n": mapped("string", "bigint")}
    checkpoint.model = {"n": {}}
    second = checkpoint.commit({}).number
    url = checkpoint.store.url
    with pytest.raises(QueryError, match=r"not the same kind[\s\S]*next:"):
        cairn.diff_state(SPARK, url, UID, "n", first, second)
    with pytest.raises(StaleEpochError):
        cairn.diff_state(SPARK, url, UID, "n", first, 99)
    with pytest.raises(StateNotFoundError):
        cairn.diff_state(SPARK, url, UID, "nope", first, second)
    write_savepoint(checkpoint.store, first, str(tmp_path / "saved"))
    with pytest.raises(QueryError, match="one epoch only"):
        cairn.diff_state(SPARK, str(tmp_path / "saved"), UID, "n", first, first)
