"""Which files are the user's, and where in them something was raised."""

from __future__ import annotations

import json

import pytest

import cairn
from cairn.user_code import find_raise, is_users

SPARK = "/opt/spark/python"


@pytest.mark.parametrize(
    "file",
    [
        f"{SPARK}/pyspark/sql/session.py",
        f"{SPARK}/lib/pyspark.zip/pyspark/worker.py",
        f"{SPARK}/lib/py4j-0.10.9.9-src.zip/py4j/protocol.py",
        "/tmp/userFiles-1/cairn.zip/cairn/slot/forward.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        cairn.__file__,
        json.__file__,
    ],
)
def test_files_of_libraries_are_not_the_users(file: str) -> None:
    assert not is_users(file)


@pytest.mark.parametrize(
    "file", ["/home/me/pyspark/job.py", "/tmp/deps.zip/mine/job.py", "<stdin>"]
)
def test_other_files_are_the_users(file: str) -> None:
    assert is_users(file)


def test_an_error_from_a_library_is_placed_at_the_users_line() -> None:
    with pytest.raises(ValueError) as raised:
        json.loads("{")
    at = find_raise(raised.value)
    assert at is not None and at.startswith(__file__)
