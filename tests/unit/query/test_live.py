"""Queries see the last committed epoch: all of it and nothing else, whatever slots do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.errors import EpochError, QueryError
from tests.backends import backend_name
from tests.simulation.led_job import LedJob
from tests.unit.plan.programs import source
from tests.unit.query.queried import (
    BACKENDS,
    EPOCHS,
    KEYS,
    STATES,
    ByBatch,
    Everything,
    Queried,
    Scoped,
    during,
    live_state,
    model_of,
)
from tests.unit.slot.scoped_job import ScopedJob
from tests.unit.slot.ttl_job import TtlJob


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
        led.coordinator.subtasks.rescale(parallelism)
        if led.epochs:
            check(led, model)
        led.run(rows=rows)
        model.take(rows)
        check(led, model)
        assert led.live.query("op", "last", 0).source == "slot"
    lost = led.coordinator.subtasks.slots[0]
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


# State that expires


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_expired_is_seen_neither_in_slots_nor_in_the_checkpoint(
    backend: str, tmp_path: Path
) -> None:
    job = TtlJob(tmp_path, "1 minute", backend=backend_name(backend))
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
