"""The driver's side of Spark, as far as it needs no Spark."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from cairn.coordinator.driver import SparkDriver


def test_a_pin_table_that_could_not_be_laid_out_fails_one_attempt_only() -> None:
    driver: Any = SparkDriver.__new__(SparkDriver)
    driver._laid = Future()
    driver._laid.set_exception(ConnectionError("the executor is lost"))
    with pytest.raises(ConnectionError):
        driver._wait_for_pin()
    driver._wait_for_pin()
