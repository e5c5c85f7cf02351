"""Keys are counted as keys and entries as entries, in epochs of this version and of older ones."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from cairn import Context, KeyedProcess, state
from cairn.backends.columnar.key_index import COUNTED_MAX, NameIndex
from cairn.driver.coordinator.measured import add_measured
from cairn.driver.coordinator.reports import operators_of, report_of
from cairn.report.epoch import NOTHING_MEASURED, LetterSample, Measured
from cairn.storage.manifest import (
    Epoch,
    EpochOperator,
    Held,
    RangeState,
    SparkPosition,
    StoredEpoch,
    decode_record,
    encode_epoch,
    resolve,
)
from cairn.testing import Harness


class Accounts(KeyedProcess[Any]):
    """Two values for every key, and a map entry for each item that is not empty."""

    n = state.Value("bigint", default=0)
    first = state.Value("bigint")
    seen: state.Map[str, int] = state.Map("string", "bigint")

    def process(self, row: Any, ctx: Context) -> None:
        self.n.set(self.n.get() + 1)
        self.first.set(1)
        if row.item.startswith("-"):
            del self.seen[row.item[1:]]
        elif row.item:
            self.seen[row.item] = 1


class Seen(KeyedProcess[Any]):
    """The map alone."""

    seen: state.Map[str, int] = state.Map("string", "bigint")

    def process(self, row: Any, ctx: Context) -> None:
        if row.item.startswith("-"):
            del self.seen[row.item[1:]]
        else:
            self.seen[row.item] = 1


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_key_with_several_states_and_map_entries_is_one_key(backend: str) -> None:
    with Harness(
        Accounts(), schema="k bigint, item string", key_by="k", out="k bigint", backend=backend
    ) as harness:
        harness.push([(key, f"i{at}") for key in range(10) for at in range(5)])
        harness.push([(key, "") for key in range(10, 20)])
        assert held(harness) == (20, 20 + 20 + 50)
        harness.commit()
        assert held(harness) == (20, 20 + 20 + 50)
        harness.push([(0, f"-i{at}") for at in range(5)] + [(1, "-i0"), (1, "i9"), (99, "")])
        assert held(harness) == (21, 21 + 21 + 45)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_map_whose_last_entry_goes_has_one_key_less(backend: str) -> None:
    with Harness(
        Seen(), schema="k bigint, item string", key_by="k", out="k bigint", backend=backend
    ) as harness:
        harness.push([(1, "a"), (1, "b"), (2, "a")])
        assert held(harness) == (2, 3)
        harness.commit()
        harness.push([(2, "-a"), (3, "a"), (3, "-a")])
        assert held(harness) == (1, 2)
        harness.commit()
        assert held(harness) == (1, 2)


def held(harness: Harness) -> Held:
    return harness._operator.state.state_held()


@pytest.mark.parametrize("keys", [50, 40_000])
def test_distinct_keys_of_a_columnar_map_are_counted_or_estimated(keys: int) -> None:
    index = NameIndex([pa.string(), pa.int64()])
    names = [f"key-{at % keys}" for at in range(5 * keys)]
    index.place([pa.array([*names, None]), pa.array(range(5 * keys + 1))])
    found = index.count_distinct(np.arange(len(index)))
    if len(index) <= 2 * COUNTED_MAX:
        assert found == keys + 1
    else:
        assert abs(found - keys) < keys * 0.05


def _range(keys: int | None, entries: int) -> RangeState:
    return RangeState(
        first_group=0, group_count=8, version="v", files=[],
        state_keys=keys, state_entries=entries, state_bytes=10,
    )  # fmt: skip


def _epoch(operators: dict[str, Any], scopes: dict[str, Any]) -> Epoch:
    """An epoch whose manifest has these metrics."""
    entries = {
        uid: EpochOperator(
            uid=uid, function_version="", key_types={}, states={}, parallelism=1,
            ranges=[_range(0, 0)], scope=scope,
        )
        for uid, scope in scopes.items()
    }  # fmt: skip
    epoch = Epoch(
        number=2, parent=None, term=1, nonce="", wall_ms=0, now_ms=0, watermarks={},
        spark=SparkPosition(folder="", batch_id=0, offsets=""),
        operators=entries,
    )  # fmt: skip
    stored = decode_record(encode_epoch(epoch, None, whole=True), "epoch")
    assert isinstance(stored, StoredEpoch)
    raw = msgspec.Raw(msgspec.json.encode({"operators": operators}))
    return resolve(msgspec.structs.replace(stored, metrics=raw), None)


def test_broadcast_state_counts_as_part_of_its_operator_and_not_as_one_more() -> None:
    own = {
        "rows_in": 10,
        "state_keys": 4,
        "state_entries": 6,
        "delta_bytes": 5,
        "entries_changed": 1,
    }
    shared = {
        "rows_in": 0,
        "state_keys": 0,
        "state_entries": 3,
        "delta_bytes": 2,
        "entries_changed": 3,
    }
    loop = dict(own, rows_in=0, state_keys=0, state_entries=0, delta_bytes=7, entries_changed=0)
    epoch = _epoch(
        {"alerts": own, "alerts:broadcast": shared, "again:alerts": loop},
        {"alerts": "keyed", "alerts:broadcast": "shared", "again:alerts": "feedback"},
    )
    (alerts,) = operators_of(epoch).values()
    assert (alerts.rows_in, alerts.state_keys, alerts.state_entries) == (10, 4, 9)
    report = report_of(epoch)
    assert (report.state_keys, report.state_entries, report.delta_bytes) == (4, 9, 14)


def test_samples_of_rows_put_aside_are_bounded_and_last_over_the_batches_of_an_epoch() -> None:
    def batch(*errors: str) -> Measured:
        sample = [LetterSample(error, "k", "{}") for error in errors]
        measured = msgspec.structs.replace(
            NOTHING_MEASURED, error_rows=len(errors), error_sample=sample
        )
        return Measured(operators={"score": measured})

    whole = add_measured(add_measured(batch("a", "b"), batch()), batch("c", "d", "e", "f"))
    score = whole.operators["score"]
    assert score.error_rows == 6
    assert [each.error for each in score.error_sample] == ["a", "b", "c", "d", "e"]
    epoch = msgspec.structs.replace(_epoch({}, {}), metrics=whole)
    assert not report_of(epoch).brief().operators["score"].error_sample, "a history has counts only"


def test_an_older_epoch_counted_entries_and_its_keys_are_unknown() -> None:
    counted = {"rows_in": 1, "state_keys": 13_881, "keys_changed": 3, "totals": {"keys_changed": 9}}
    old = {"count": counted, "empty": {"rows_in": 1, "state_keys": 0}}
    epoch = _epoch(old, {"count": "keyed", "empty": "keyed"})
    report = report_of(epoch)
    assert (report.state_keys, report.state_entries) == (None, 13_881)
    count = report.operators["count"]
    assert count.totals is not None
    assert (count.entries_changed, count.totals.entries_changed) == (3, 9)
    assert report.operators["empty"].state_keys == 0
