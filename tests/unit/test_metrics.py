"""Metrics of user functions: what counts, what is taken back, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from cairn import BatchProcess, FunctionError, KeyedProcess, Process, state
from cairn.metrics import (
    NAMES_MAX,
    HistogramCounts,
    Metrics,
    UserMetrics,
    add_metrics,
    merge_subtasks,
)
from cairn.testing import Harness

ROWS = "k string, v long"


class Watch(KeyedProcess[Any]):
    n = state.Value("long", default=0)

    def open(self, ctx: Any) -> None:
        self.seen = ctx.metrics.counter("seen")
        self.largest = ctx.metrics.gauge("largest")
        self.sizes = ctx.metrics.histogram("sizes", buckets=(1, 10))

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        self.seen.inc()
        self.largest.set(row.v)
        self.sizes.observe(row.v)
        if row.v < 0:
            raise ValueError("negative")
        return row.k, self.n.get()


@pytest.fixture
def watch() -> Iterator[Harness]:
    with Harness(Watch(), ROWS, "k", "k string, n long") as harness:
        yield harness


def test_what_is_counted_adds_up_over_epochs(watch: Harness) -> None:
    watch.push([("a", 1), ("b", 5)])
    watch.commit()
    watch.push(("a", 50))
    sizes = HistogramCounts(3, 56.0, [(1.0, 1), (10.0, 2)])
    assert watch.metrics == UserMetrics({"seen": 3}, {"largest": 50}, {"sizes": sizes})


def test_an_epoch_that_is_rolled_back_has_counted_nothing(watch: Harness) -> None:
    watch.push(("a", 1))
    watch.commit()
    before = watch.metrics
    watch.push([("a", 7), ("b", 8)])
    watch.rollback()
    assert watch.metrics == before
    with pytest.raises(FunctionError):
        watch.push(("a", -1))
    assert watch.metrics == before


def test_a_slot_that_starts_anew_goes_on_counting(watch: Harness) -> None:
    watch.push(("a", 1))
    watch.snapshot_and_restore()
    watch.push(("a", 1))
    assert watch.metrics.counters == {"seen": 2}


def test_a_row_that_is_put_aside_has_counted_nothing() -> None:
    with Harness(Watch(), ROWS, "k", "k string, n long", on_error="dead-letter") as harness:
        harness.push([("a", 3), ("a", -1), ("b", 4)])
        harness.commit()
        assert len(harness.side("errors")) == 1
        sizes = HistogramCounts(2, 7.0, [(1.0, 0), (10.0, 2)])
        assert harness.metrics == UserMetrics({"seen": 2}, {"largest": 4}, {"sizes": sizes})


class Sum(BatchProcess):
    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        ctx.metrics.counter("rows").inc(np.int64(batch.num_rows))
        if -1 in batch["v"].to_pylist():
            raise ValueError("negative")


def test_a_batch_that_is_halved_counts_each_row_once() -> None:
    with Harness(Sum(), ROWS, "k", ROWS, on_error="dead-letter") as harness:
        harness.push([("a", v) for v in (1, 2, -1, 4, 5)])
        harness.commit()
        assert harness.metrics.counters == {"rows": 4}


class Pass(Process[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        ctx.metrics.counter("passed").inc(0.5)
        return row


def test_functions_without_keys_count_too() -> None:
    with Harness(Pass(), ROWS, None, ROWS) as harness:
        harness.push([("a", 1), ("b", 2)])
        assert harness.metrics.counters == {"passed": 1.0}


class Reminder(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        ctx.timers.processing(after=1000)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        ctx.metrics.counter("fired").inc()


def test_timers_count_too() -> None:
    with Harness(Reminder(), ROWS, "k", ROWS) as harness:
        harness.push([("a", 1), ("b", 2)])
        harness.commit()
        harness.clock.advance_ms(1000)
        harness.tick()
        assert harness.metrics.counters == {"fired": 2}


@pytest.mark.parametrize(
    "name", ["", "1st", "a-b", "a b", "ä", "x" * 101, "rows_total", "a_bucket", "a_sum", 3]
)
def test_names_that_prometheus_would_not_take_are_refused(name: Any) -> None:
    with pytest.raises(FunctionError, match="name"):
        Metrics().counter(name)


def test_a_name_is_of_one_kind() -> None:
    metrics = Metrics()
    assert metrics.counter("a") is metrics.counter("a")
    assert metrics.histogram("h") is metrics.histogram("h")
    for make in (metrics.gauge, metrics.histogram):
        with pytest.raises(FunctionError, match="'a' is already a counter"):
            make("a")
    with pytest.raises(FunctionError, match="already has other buckets"):
        metrics.histogram("h", buckets=(1, 2))


def test_names_made_of_data_are_refused_before_they_are_many() -> None:
    metrics = Metrics()
    for index in range(NAMES_MAX):
        metrics.gauge(f"key_{index}")
    with pytest.raises(FunctionError, match=f"at most {NAMES_MAX} metrics"):
        metrics.gauge("one_more")


@pytest.mark.parametrize("buckets", [(), (1, 1), (2, 1), (1, float("inf")), range(51)])
def test_buckets_are_some_rising_numbers(buckets: Any) -> None:
    with pytest.raises(FunctionError, match="expected: 1 to 50"):
        Metrics().histogram("h", buckets=buckets)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_no_file_takes_are_refused(value: float) -> None:
    metrics = Metrics()
    for call in (
        metrics.counter("c").inc,
        metrics.gauge("g").set,
        metrics.histogram("h").observe,
    ):
        with pytest.raises(FunctionError, match="found"):
            call(value)
    with pytest.raises(FunctionError, match="goes up"):
        metrics.counter("c").inc(-1)


def test_a_value_on_a_bound_is_in_the_bucket_below_it() -> None:
    histogram = (metrics := Metrics()).histogram("h", buckets=(1, 2))
    for value in (0, 1, 2, 3):
        histogram.observe(value)
    found = metrics.collect().histograms["h"]
    assert found == HistogramCounts(4, 6.0, [(1.0, 2), (2.0, 3)])


def test_what_is_collected_can_be_written_as_json() -> None:
    metrics = Metrics()
    metrics.counter("c").inc(np.int32(2))
    metrics.gauge("g").set(np.float32(0.5))
    metrics.histogram("h").observe(np.float64(0.1))
    msgspec.json.encode(metrics.collect())
    metrics.reset()
    assert metrics.collect().counters == {"c": 0} and metrics.collect().gauges == {}


def _counted(seen: int, largest: float | None, bounds: tuple[float, ...] = (1.0,)) -> Any:
    metrics = Metrics()
    metrics.counter("seen").inc(seen)
    metrics.histogram("h", bounds).observe(seen)
    gauge = metrics.gauge("largest")
    if largest is not None:
        gauge.set(largest)
    return metrics.collect()


def test_subtasks_count_together_and_the_largest_gauge_is_shown() -> None:
    found = merge_subtasks([_counted(1, 5.0), _counted(2, 9.0), _counted(3, None)])
    assert found.counters == {"seen": 6} and found.gauges == {"largest": 9.0}
    assert found.histograms["h"] == HistogramCounts(3, 6.0, [(1.0, 1)])
    assert merge_subtasks([]) == UserMetrics()


def test_a_gauge_that_is_not_set_again_keeps_its_value_and_may_go_down() -> None:
    first = add_metrics(UserMetrics(), _counted(1, 5.0))
    assert add_metrics(first, _counted(1, None)).gauges == {"largest": 5.0}
    assert add_metrics(first, _counted(1, 2.0)).gauges == {"largest": 2.0}
    assert add_metrics(first, None) == first


def test_a_histogram_with_other_buckets_is_counted_anew() -> None:
    found = add_metrics(_counted(1, None), _counted(3, None, (1.0, 2.0))).histograms["h"]
    assert found == HistogramCounts(1, 3.0, [(1.0, 0), (2.0, 0)])


def test_numbers_of_numpy_are_added_up_as_plain_ones() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.counter("short").inc(np.int16(20_000))  # type: ignore[arg-type]
        metrics.counter("byte").inc(np.uint8(200))  # type: ignore[arg-type]
        metrics.counter("float").inc(np.float32(1 << 24))
        metrics.counter("float").inc(np.float32(1))
    for _ in range(1000):
        metrics.histogram("h").observe(np.float32(16_777.25))
    found = metrics.collect()
    assert found.counters == {"short": 60_000, "byte": 600, "float": 3.0 * ((1 << 24) + 1)}
    assert found.histograms["h"].sum == 16_777_250.0


def _sentinels() -> Any:
    metrics = Metrics()
    for _ in range(2):
        metrics.counter("whole").inc(2**64)
        metrics.counter("real").inc(sys.float_info.max)
        metrics.histogram("h").observe(sys.float_info.max)
    return metrics.collect()


def test_sums_beyond_the_largest_number_stay_at_it() -> None:
    for found in (_sentinels(), merge_subtasks([_sentinels(), _sentinels()])):
        assert found.counters == {"whole": 2**63 - 1, "real": sys.float_info.max}
        assert found.histograms["h"].sum == sys.float_info.max
        msgspec.msgpack.encode(found)
    total = add_metrics(_sentinels(), _sentinels())
    assert msgspec.json.decode(msgspec.json.encode(total), type=UserMetrics) == total


def test_a_total_that_was_stored_as_null_is_counted_anew() -> None:
    histograms = {"h": HistogramCounts(1, None, [(1.0, 1)])}
    before = UserMetrics({"seen": None}, {}, histograms)
    found = add_metrics(before, _counted(3, None))
    assert found.counters == {"seen": 3}
    assert found.histograms["h"] == HistogramCounts(2, 3.0, [(1.0, 1)])
