"""Slots of a run, as far as they do without Spark."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from cairn.driver.spark_slots import SparkSlots


def test_a_first_pin_table_that_failed_fails_one_attempt_only() -> None:
    slots = SparkSlots.__new__(SparkSlots)
    slots._started = Future()
    slots._started.set_exception(RuntimeError("an executor was lost"))
    with pytest.raises(RuntimeError, match="executor was lost"):
        slots.wait()
    assert not slots.are_starting
    slots.wait()
