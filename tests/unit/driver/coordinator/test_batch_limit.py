"""The limit of bytes in a batch: lifted only where rows are known to be small."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cairn.driver.coordinator.batch_limit import (
    BATCH_BYTES_MAX,
    NO_LIMIT,
    SMALL_ROW_BYTES,
    BatchLimit,
)

NUMBERS = [pa.int64(), pa.float64(), pa.timestamp("us"), pa.bool_()]


def test_rows_of_numbers_have_no_limit_from_the_first_epoch():
    assert BatchLimit(NUMBERS, has_other_functions=False).choose(0) == NO_LIMIT


@pytest.mark.parametrize("type_", [pa.string(), pa.binary(), pa.list_(pa.int64())])
def test_rows_of_varying_size_have_a_limit_until_they_are_seen_to_be_small(type_):
    limit = BatchLimit([*NUMBERS, type_], has_other_functions=False)
    assert limit.choose(0) == BATCH_BYTES_MAX
    limit.learn([100, SMALL_ROW_BYTES])
    assert limit.choose(0) == NO_LIMIT


def test_limit_is_back_in_a_second_attempt_and_when_rows_grow():
    limit = BatchLimit([pa.string()], has_other_functions=False)
    limit.learn([10])
    assert limit.choose(1) == BATCH_BYTES_MAX
    limit.learn([10, SMALL_ROW_BYTES + 1])
    assert limit.choose(0) == BATCH_BYTES_MAX


def test_an_epoch_without_rows_changes_nothing():
    limit = BatchLimit([pa.string()], has_other_functions=False)
    limit.learn([0, 0])
    limit.learn([])
    assert limit.choose(0) == BATCH_BYTES_MAX
    limit.learn([10])
    limit.learn([0, 0])
    assert limit.choose(0) == NO_LIMIT


def test_limit_holds_beside_python_functions_that_nobody_measures():
    limit = BatchLimit(NUMBERS, has_other_functions=True)
    limit.learn([10])
    assert limit.choose(0) == BATCH_BYTES_MAX
