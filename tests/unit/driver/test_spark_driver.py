"""The Spark driver, as far as it does without Spark."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from cairn.driver.spark_driver import SparkDriver


def test_a_first_pin_table_that_failed_fails_one_attempt_only() -> None:
    driver = SparkDriver.__new__(SparkDriver)
    driver._started = Future()
    driver._started.set_exception(RuntimeError("an executor was lost"))
    with pytest.raises(RuntimeError, match="executor was lost"):
        driver._wait_for_slots()
    driver._wait_for_slots()
