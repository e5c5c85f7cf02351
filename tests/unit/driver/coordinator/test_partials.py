"""When Spark aggregates ahead: learned from epochs, fixed within one."""

from __future__ import annotations

from cairn.driver.coordinator.partials import PartialChoice
from cairn.protocol.messages import Ack, OperatorAck


def acks(*counts: tuple[int, int]) -> list[Ack]:
    """(rows, groups) of each subtask of an aggregation, beside an operator that is none."""
    return [
        Ack(
            0,
            subtask,
            [
                OperatorAck(
                    "sum", rows, rows_out=0, keys_changed=0, delta=None, partial_count=groups
                ),
                OperatorAck("other", 10**6, rows_out=0, keys_changed=0, delta=None),
            ],
            {},
        )
        for subtask, (rows, groups) in enumerate(counts)
    ]


def test_it_begins_row_by_row_and_learns() -> None:
    choice = PartialChoice()
    assert choice.choose(1) == frozenset()
    choice.learn(acks((10_000, 100), (9_000, 100)))
    assert choice.choose(2) == {"sum"}


def test_attempts_at_an_epoch_agree() -> None:
    choice = PartialChoice()
    assert choice.choose(1) == frozenset()
    choice.learn(acks((10_000, 100)))
    assert choice.choose(1) == frozenset(), "another attempt at the same epoch"
    assert choice.choose(2) == {"sum"}


def test_one_busy_subtask_is_reason_enough() -> None:
    choice = PartialChoice()
    choice.learn(acks((75_000, 25_000), (25_000, 25_000)))
    assert choice.choose(1) == {"sum"}


def test_it_goes_back_when_nothing_is_gained_and_not_before() -> None:
    choice = PartialChoice()
    choice.learn(acks((10_000, 3_000)))
    assert choice.choose(1) == {"sum"}
    choice.learn(acks((10_000, 5_000)))
    assert choice.choose(2) == {"sum"}
    choice.learn(acks((10_000, 9_000)))
    assert choice.choose(3) == frozenset()


def test_small_and_empty_epochs_tell_nothing() -> None:
    choice = PartialChoice()
    choice.learn(acks((10_000, 100)))
    choice.learn(acks((10, 10), (0, 0)))
    choice.learn(acks((0, 0)))
    assert choice.choose(1) == {"sum"}
