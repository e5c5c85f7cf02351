"""Rounds of an epoch: what each one starts from, and what becomes of them in the manifest."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cairn.driver.coordinator.epoch as epoch_module
from cairn.driver.coordinator.rounds import (
    count_inlined_bytes,
    in_flight,
    is_pending,
    next_round,
    sends_back,
)
from cairn.driver.coordinator.ticker import is_due
from cairn.errors import EpochError
from cairn.protocol.messages import Ack, Begin, Compaction, OperatorAck, Part, Piece
from cairn.sinks.base import Execution
from cairn.storage.files import StateFile
from cairn.storage.manifest import EMPTY_VERSION, next_version
from tests.simulation.looping import HopsWorld
from tests.simulation.world import Driver

FEEDBACKS = {"loop:op"}


def begin(**execution: int) -> Begin:
    return Begin(
        execution=Execution(**{"attempt": 2, **execution}),
        run_id="r", term=1, epoch=5, parent=4, now_ms=7, watermark_ms=3, parallelism=2,
        group_count=2, inline_bytes_max=9, rewrite=["op"],
        parts={
            0: Part(
                {"op": "a", "loop:op": "x"},
                {"op": Compaction("base", 1, 0)},
                {"op": [Piece(0, 1, "p")]},
                ["s"],
            ),
            1: Part({"op": EMPTY_VERSION, "loop:op": EMPTY_VERSION}),
        },
    )  # fmt: skip


def acks(*deltas: tuple[str, int, str | None]) -> list[Ack]:
    return [
        Ack(
            0,
            subtask,
            [OperatorAck(uid, 1, 1, 1, None if id is None else StateFile(id, "delta", 1, 1))],
            {},
        )
        for uid, subtask, id in deltas
    ]


def test_the_next_round_starts_from_what_this_one_left() -> None:
    said = acks(("op", 0, "d"), ("op", 1, None), ("loop:op", 0, None), ("loop:op", 1, "f"))
    after = next_round(begin(), said, FEEDBACKS)
    assert {subtask: part.versions for subtask, part in after.parts.items()} == {
        0: {"op": next_version("a", "d"), "loop:op": EMPTY_VERSION},
        1: {"op": EMPTY_VERSION, "loop:op": "f"},
    }
    assert (after.epoch, after.now_ms, after.watermark_ms, after.parent) == (5, 7, 3, 4)
    assert after.execution == Execution(batch=0, attempt=2, round=1)


def test_executions_compare_in_the_order_in_which_they_run() -> None:
    ran = [(0, 0, 0), (0, 0, 9), (0, 3, 0), (0, 3, 1), (1, 0, 0)]
    tokens = [begin(batch=b, attempt=a, round=r).token(7) for b, a, r in ran]
    assert all(before < after for before, after in pairwise(tokens))
    assert tokens[-1] < msgspec.structs.replace(begin(), epoch=6).token()


def test_what_is_done_beside_the_epochs_is_asked_for_in_the_first_round_only() -> None:
    after = next_round(begin(), acks(("op", 0, "d")), FEEDBACKS)
    assert all(part == Part(part.versions) for part in after.parts.values())
    assert not after.rewrite


def test_what_travels_with_acknowledgements_is_bounded_over_all_rounds() -> None:
    large = [
        Ack(0, 0, [OperatorAck("op", 1, 1, 1, StateFile("d", "delta", 5, 1, data=b"12345"))], {})
    ]
    assert count_inlined_bytes(large) == 5 and count_inlined_bytes(acks(("op", 0, "d"))) == 0
    assert next_round(begin(), large, FEEDBACKS, 5).inline_bytes_max == begin().inline_bytes_max
    assert next_round(begin(), large, FEEDBACKS, 1 << 40).inline_bytes_max == 0


def test_a_record_on_its_way_back_is_told_by_the_acknowledgements() -> None:
    assert sends_back(acks(("op", 0, None), ("loop:op", 1, "f")), FEEDBACKS)
    assert not sends_back(acks(("op", 0, "d"), ("loop:op", 1, None)), FEEDBACKS)


@pytest.fixture
def world(tmp_path: Path) -> HopsWorld:
    return HopsWorld(3, tmp_path, rounds_max=4)


def test_an_epoch_goes_around_until_nothing_is_sent_back_or_rounds_run_out(
    world: HopsWorld,
) -> None:
    driver = Driver(world)
    driver.start()
    driver.run_batch(6)
    epoch = driver.coordinator.newest
    assert epoch is not None and epoch.timings.rounds == 4
    assert is_pending(epoch) and is_due(epoch, epoch.now_ms)
    assert in_flight(epoch) == len(world.in_flight()) > 0
    seen = len(list(world.seen().elements()))
    assert epoch.metrics.operators["visit"].rows_in == seen
    while driver.run_idle():
        pass
    last = driver.coordinator.newest
    assert last is not None and last.timings.rounds < 4
    assert not is_pending(last) and in_flight(last) == 0
    world.check_all()


def test_a_job_that_is_stopped_goes_around_no_more(world: HopsWorld) -> None:
    world.rounds_max = 1 << 19
    driver = Driver(world)
    driver.start()
    asked = iter([False, True])
    driver.coordinator.is_stopping = lambda: next(asked)
    driver.run_batch(6)
    epoch = driver.coordinator.newest
    assert epoch is not None and epoch.timings.rounds == 2
    assert is_pending(epoch)
    world.check_output()


def test_deltas_and_output_of_all_rounds_are_in_the_epoch(world: HopsWorld) -> None:
    driver = Driver(world, parallelism=1)
    driver.start()
    driver.run_batch(6)
    epoch = driver.coordinator.newest
    assert epoch is not None
    (part,) = epoch.operators["visit"].ranges
    assert [(ref.first_epoch, ref.kind) for ref in part.files] == [(epoch.number, "delta")] * 4
    (back,) = epoch.operators["loop:visit"].ranges
    assert [ref.kind for ref in back.files] == ["base"]
    assert len(epoch.committables["seen"]) == 4
    world.check_output()


def test_what_is_sent_back_is_stored_only_for_the_next_epoch(
    world: HopsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_module, "INLINE_BYTES_MAX", 0)
    driver = Driver(world)
    driver.start()
    driver.run_batch(6)
    epoch = driver.coordinator.newest
    assert epoch is not None and is_pending(epoch) and epoch.timings.rounds == 4
    named = {ref.path for e in epoch.operators.values() for part in e.ranges for ref in part.files}
    assert {found.path for found in world.store.list("state/")} == named
    while driver.run_idle():
        pass
    world.check_all()


def test_a_slot_lost_between_rounds_costs_the_whole_attempt(
    world: HopsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(world)
    driver.start()
    begins: list[tuple[int, int]] = []
    execute = driver.cluster.execute

    def losing(sources: Any, begun: Begin) -> Any:
        begins.append((begun.execution.attempt, begun.execution.round))
        if begins == [(0, 0), (0, 1)]:
            driver.cluster.kill(0)
        return execute(sources, begun)

    monkeypatch.setattr(driver.cluster, "execute", losing)
    driver.run_batch(6)
    assert begins == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    world.check_output()


def test_an_epoch_that_fails_in_every_attempt_has_published_nothing(
    world: HopsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(world)
    driver.start()
    execute = driver.cluster.execute

    def failing(sources: Any, begun: Begin) -> Any:
        if begun.execution.round == 2:
            raise EpochError("no third round")
        return execute(sources, begun)

    monkeypatch.setattr(driver.cluster, "execute", failing)
    with pytest.raises(EpochError, match="no third round"):
        driver.run_batch(6)
    assert driver.coordinator.newest is None and not world.seen()
