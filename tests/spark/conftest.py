"""One Spark session for all tests that can share it; the others start driver programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cairn
from tests.spark.support import Input


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    session = cairn.session(
        "tests", master="local[2]", ui__enabled=False, sql__shuffle__partitions=2
    )
    yield session
    session.stop()


@pytest.fixture
def make_input(tmp_path: Path) -> Any:
    """make_input("a bigint, b string") -> a folder of files, each one an epoch."""
    made: list[Input] = []

    def make(schema: str) -> Input:
        made.append(Input(tmp_path / f"input-{len(made)}", schema))
        return made[-1]

    return make
