"""Queries see the last committed epoch: all of it and nothing else, whatever slots do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.errors import EpochError, QueryError, StateNotFoundError
from cairn.snapshots import reader
from cairn.types import parse_schema
from tests.simulation.led_job import LedJob
from tests.unit.plan.programs import source
from tests.unit.query.queried import (
    STATES,
    ByBatch,
    Everything,
    Mean,
    Queried,
    Scoped,
    TypedJob,
    during,
    live_state,
    model_of,
)
from tests.unit.slot.scoped_job import ScopedJob
from tests.unit.slot.ttl_job import TtlJob

BACKENDS = ["heap", "rocksdb"]
KEYS = list(range(12))
EPOCHS = [
    [(k, k) for k in KEYS],
    [(k, k + 1) for k in KEYS[:6]] + [(0, 7)],
    [(1, -1), (2, -1), (2, 5), (50, 1)],
    [],
    [(k, 100 + k) for k in KEYS[::2]],
]


@pytest.fixture(autouse=True)
def nobody_asks() -> Iterator[None]:
    during.clear()
    yield
    during.clear()


class Model:
    """What is committed, as plain values by key."""

    def __init__(self) -> None:
        self.values: dict[int, list[int]] = {}

    def take(self, rows: list[tuple[int, int]]) -> None:
        for k, v in rows:
            self.values.setdefault(k, []).append(v)

    def held(self, state: str) -> dict[int, Any]:
        found = {k: model_of(values, k) for k, values in self.values.items()}
        return {k: states[state] for k, states in found.items() if state in states}


def check(led: Queried, model: Model, states: tuple[str, ...] = STATES) -> None:
    """Everything there is, in one question each, is the model's."""
    committed = led.coordinator.committed
    assert committed is not None
    for name in states:
        answers = led.live.query_many("op", name, [*KEYS, 50, 51])
        assert answers.values == model.held(name), name
        assert answers.epoch == committed.number


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_of_every_kind_is_that_of_the_last_committed_epoch(
    backend: str, tmp_path: Path
) -> None:
    led, model = Queried(Everything(), tmp_path, backend=backend), Model()
    led.run(rows=EPOCHS[0])
    model.take(EPOCHS[0])
    checks = 0

    def ask() -> None:
        nonlocal checks
        checks += 1
        check(led, model)

    during.append(ask)
    led.after_finish = ask
    for rows in EPOCHS[1:]:
        led.run(rows=rows)
        model.take(rows)
        check(led, model)
    assert checks > 10
    answer = led.live.query("op", "total", 0)
    assert answer == (model.held("total")[0], led.epochs[-1].number, True, "slot")
    assert led.live.query("op", "total", 51) == (None, led.epochs[-1].number, False, "slot")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_checkpoint_answers_the_same_as_the_slots(backend: str, tmp_path: Path) -> None:
    led, model = Queried(Everything(), tmp_path, backend=backend), Model()
    for rows in EPOCHS:
        led.run(rows=rows)
        model.take(rows)
        led.slots.are_silent = True
        check(led, model)
        assert led.live.query("op", "seen", 0).source == "checkpoint"
        led.slots.are_silent = False


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_attempt_that_fails_half_way_is_never_seen(backend: str, tmp_path: Path) -> None:
    led, model = Queried(Everything(), tmp_path, backend=backend, attempts_max=3), Model()
    led.run(rows=EPOCHS[0])
    model.take(EPOCHS[0])
    failures = 2

    def fail() -> None:
        nonlocal failures
        check(led, model)
        failures -= 1
        if failures >= 0:
            raise EpochError("the task failed after it had finished")

    led.after_finish = fail
    led.run(rows=EPOCHS[1])
    model.take(EPOCHS[1])
    check(led, model)
    assert led.live.query("op", "last", 0).source == "slot"


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_rescale_and_a_loss_the_same_is_found_as_before(
    backend: str, tmp_path: Path
) -> None:
    led, model = Queried(Everything(), tmp_path, backend=backend), Model()
    for parallelism, rows in zip((2, 3, 3, 1, 4), EPOCHS, strict=True):
        led.coordinator.rescale(parallelism)
        if led.epochs:
            check(led, model)
        led.run(rows=rows)
        model.take(rows)
        check(led, model)
        assert led.live.query("op", "last", 0).source == "slot"
    lost = led.coordinator.slots[0]
    led.cluster.kill(lost)
    check(led, model)
    answers = led.live.query_many("op", "total", KEYS)
    assert (answers.source, answers.epoch) == ("checkpoint", led.epochs[-1].number)


def test_batches_of_an_epoch_that_is_not_committed_are_not_seen(tmp_path: Path) -> None:
    led, model = Queried(Everything(), tmp_path, checkpoint_every=2), Model()
    led.run(rows=EPOCHS[0])
    with pytest.raises(EpochError, match="no committed epoch yet"):
        led.live.query("op", "total", 1)
    led.run(rows=EPOCHS[1])
    model.take(EPOCHS[0] + EPOCHS[1])
    check(led, model)
    led.run(rows=EPOCHS[2])
    check(led, model)
    led.run(rows=EPOCHS[3])
    model.take(EPOCHS[2])
    check(led, model)


def test_a_slot_that_has_moved_on_is_asked_for_what_is_committed_by_now(tmp_path: Path) -> None:
    led = Queried(Everything(), tmp_path)
    led.run(rows=EPOCHS[0])
    asking, before = led.live._ask, led.coordinator.committed

    def late(asked: Any) -> Any:
        if led.coordinator.committed is before:
            led.run(rows=EPOCHS[1])
            led.run(rows=EPOCHS[3])
        return asking(asked)

    led.live._ask = late
    answer = led.live.query("op", "total", 0)
    assert answer == (8, led.epochs[-1].number, True, "slot")


# State that functions write by the batch


BATCH_STATES = {
    "last": lambda values: (values[-1], f"v{values[-1]}"),
    "seen": lambda values: {v: v * 2 for v in values},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_of_batches_is_that_of_the_last_committed_epoch(backend: str, tmp_path: Path) -> None:
    led, model = Queried(ByBatch(), tmp_path, backend=backend, attempts_max=2), Model()
    led.run(rows=EPOCHS[0])
    model.take(EPOCHS[0])
    failures = 1

    def ask() -> None:
        for name, held in BATCH_STATES.items():
            answers = led.live.query_many("op", name, [*KEYS, 50, 51])
            kept = {k: list(values) for k, values in model.values.items()}
            for values in kept.values():
                if -1 in values:
                    del values[: values.index(-1) + 1]
            assert answers.values == {k: held(values) for k, values in kept.items() if values}
            assert answers.source == "slot"

    def fail_once() -> None:
        nonlocal failures
        ask()
        failures -= 1
        if failures == 0:
            raise EpochError("the task failed")

    during.append(ask)
    led.after_finish = fail_once
    for rows in EPOCHS[1:]:
        led.run(rows=rows)
        model.take(rows)
        ask()


# Other scopes


def test_the_list_of_a_subtask_is_found_by_its_number(tmp_path: Path) -> None:
    led = Queried(Scoped(), tmp_path, keys=())
    led.run(rows=[(0, 10), (0, 11), (0, 12)])
    assert led.live.query("op", "own", 0).value == [10, 12]
    assert led.live.query("op", "own", 1) == ([11], led.epochs[-1].number, True, "slot")
    assert not led.live.query("op", "own", 2).found
    led.slots.are_silent = True
    assert led.live.query("op", "own", 0).value == [10, 12]
    assert led.live.query("op", "own", 0).source == "checkpoint"


def test_broadcast_state_is_found_by_its_map_key(tmp_path: Path) -> None:
    job = ScopedJob(tmp_path)
    job.lead(2)
    job.run(rows=[(1, 1)], rules=[("low", 3), ("high", 9)])
    live = live_state(job)
    assert live.query("alerts", "rules", "low") == (3, job.newest.number, True, "slot")
    assert live.query_many("alerts", "rules", ["low", "high", "none"]).values == {
        "low": 3,
        "high": 9,
    }
    job.run(rules=[("low", None)])
    assert not live.query("alerts", "rules", "low").found
    job.kill()
    assert live.query("alerts", "rules", "high") == (9, job.newest.number, True, "checkpoint")


# Loops


class Around(KeyedProcess[Any]):
    """Goes around until `v` is 0, and counts."""

    n = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        for ask in during:
            ask()
        return (row.k, row.v - 1) if row.v else None


def test_rounds_of_an_epoch_that_is_not_committed_are_not_seen(tmp_path: Path) -> None:
    job, out = Job("loops", max_parallelism=8), sinks.Collect()

    def body(loop: Any) -> Any:
        around = loop.key_by("k").process(Around(), schema="k long, v long", uid="around")
        return around, around

    looped = source(job, "s", "k long, v long").iterate(body, uid="loop", max_rounds_per_epoch=4)
    looped.sink_to(out, uid="out")
    led = LedJob(job, tmp_path)
    live = live_state(led)
    expected: dict[int, int] = {}
    checks = 0

    def ask() -> None:
        nonlocal checks
        if led.epochs:
            checks += 1
            assert live.query_many("around", "n", KEYS).values == expected

    during.append(ask)
    for hops in (2, 3, 0):
        led.run(s=[(k, hops) for k in KEYS])
        expected = {k: expected.get(k, 0) + hops + 1 for k in KEYS}
        ask()
        assert live.query("around", "n", 0).source == "slot"
    assert checks > len(KEYS) * 4
    with pytest.raises(QueryError, match="on their way back"):
        live.query("loop:around", "records", 1)


# Other functions


class Last(KeyedProcess[Any]):
    n: state.Value[Any]

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(row.v)
        for ask in during:
            ask()


class Narrow(Last):
    n = state.Value("int")


class Same(Narrow):
    """Another function with the same state."""


class Wide(Last):
    n = state.Value("long")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_upgrade_changes_no_answer_before_it_is_committed(backend: str, tmp_path: Path) -> None:
    led = Queried(Narrow(), tmp_path, backend=backend)
    led.run(rows=[(k, k) for k in KEYS])
    number, expected = led.epochs[-1].number, {k: k for k in KEYS}
    sources: list[str] = []

    def ask() -> None:
        answers = led.live.query_many("op", "n", KEYS)
        assert (answers.values, answers.epoch) == (expected, number)
        sources.append(answers.source)

    during.append(ask)
    for function, rewrite, while_it_runs in ((Same(), (), "slot"), (Wide(), ("op",), "checkpoint")):
        led.upgrade("op", function, rewrite)
        ask()
        sources.clear()
        led.run(rows=[(0, number)])
        assert set(sources) == {while_it_runs}
        number, expected = led.epochs[-1].number, expected | {0: number}
        ask()
        assert sources[-1] == "slot"


# State that expires


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_expired_is_seen_neither_in_slots_nor_in_the_checkpoint(
    backend: str, tmp_path: Path
) -> None:
    job = TtlJob(tmp_path, "1 minute", backend=backend)
    live = live_state(job)
    job.run((1, 10), (2, 20))
    job.run((1, 11), after_ms=40_000)

    def seen() -> Any:
        states = ("value", "total", "items", "entries")
        answers = [live.query_many("keep", name, [1, 2]) for name in states]
        return [answer.values for answer in answers], answers[0].source

    both = [{1: 11, 2: 20}, {1: 21, 2: 20}, {1: [10, 11], 2: [20]}]
    assert seen() == ([*both, {1: {"10": 10, "11": 11}, 2: {"20": 20}}], "slot")
    job.run(after_ms=30_000)
    left = [{1: 11}, {1: 21}, {1: [11]}, {1: {"11": 11}}]
    assert seen() == (left, "slot")
    job.sweep()
    assert seen() == (left, "slot")
    job.cluster.slots.clear()
    assert seen() == (left, "checkpoint")


def test_keys_of_one_answer_expire_together_though_one_slot_is_ahead(tmp_path: Path) -> None:
    """An epoch has begun in one slot, which has removed what expired before it; not in another."""
    job = TtlJob(tmp_path, "1 minute")
    live = live_state(job)
    keys = list(range(20))
    job.run(*[(key, 1) for key in keys])
    assert live.query_many("keep", "value", keys).values == dict.fromkeys(keys, 1)
    job.clock.advance_ms(61_000)
    begun: list[Any] = []

    def ask() -> None:
        begun.append(live.query_many("keep", "value", keys).values)

    execute = job.cluster._attempt

    def attempt(*given: Any) -> Any:
        done = execute(*given)
        job.sweep()
        ask()
        return done

    job.cluster._attempt = attempt  # type: ignore[method-assign]
    job.run()
    assert begun == [{}, {}]


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
    with pytest.raises(QueryError, match=r"'one' is no key.*\n  expected: k of type bigint"):
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
                assert "is no key of it" in str(error)


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


# Aggregates


class Doubled:
    def create(self) -> Any:
        return 0.0

    def add(self, held: Any, value: float) -> Any:
        return held + value

    def merge(self, one: Any, other: Any) -> Any:
        return one + other

    def result(self, held: Any) -> float:
        return float(held * 2)


class ByMean(KeyedProcess[Any]):
    a = state.Aggregating("struct<n:long,s:double>", Mean())
    b = state.Value("double")

    def process(self, row: Any, ctx: Any) -> Any:
        self.a.add(float(row.v))
        self.b.set(float(row.v))


class ByDoubled(KeyedProcess[Any]):
    a = state.Aggregating("double", Doubled(), migrate=lambda held: held[1])
    b = state.Aggregating("double", Doubled())

    def process(self, row: Any, ctx: Any) -> Any:
        self.a.add(float(row.v))
        self.b.add(float(row.v))


def test_an_upgrade_changes_no_aggregate_before_it_is_committed(tmp_path: Path) -> None:
    led = Queried(ByMean(), tmp_path)
    led.run(rows=[(1, 10), (1, 30)])
    led.upgrade("op", ByDoubled(), ("op",))
    for led.slots.are_silent in (False, True):
        assert led.live.query("op", "a", 1).value == 20.0
        assert led.live.query("op", "b", 1).value == 30.0
    led.run(rows=[(1, 5)])
    assert led.live.query("op", "a", 1).value == 90.0
    assert led.live.query("op", "b", 1).value == 70.0


def test_a_start_with_another_aggregate_makes_up_no_answer(tmp_path: Path) -> None:
    led = Queried(ByMean(), tmp_path)
    led.run(rows=[(1, 10), (1, 30)])
    led.coordinator.committed_by = None  # As after a restart: who made the epoch is not known.
    assert led.live.query("op", "a", 1).value == 20.0
    led.upgrade("op", ByDoubled(), ("op",))
    led.live._lookups.clear()
    with pytest.raises(QueryError, match="made by another version"):
        led.live.query("op", "a", 1)
    assert led.live.query("op", "b", 1).value == 30.0


class Ratio(Mean):
    def result(self, held: Any) -> float:
        return float(held[1] / (held[0] - 1))


class Failing(KeyedProcess[Any]):
    a = state.Aggregating("struct<n:long,s:double>", Ratio())

    def process(self, row: Any, ctx: Any) -> Any:
        self.a.add(float(row.v))


def test_a_result_that_raises_says_whose_it_is(tmp_path: Path) -> None:
    led = Queried(Failing(), tmp_path)
    led.run(rows=[(7, 10)])
    with pytest.raises(QueryError, match=r"'op'.*'a'.*key 7 failed: ZeroDivisionError"):
        led.live.query("op", "a", 7)
