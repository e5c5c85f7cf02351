"""One Spark session for all tests that can share it; the others start driver programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cairn
from tests.spark.live import Undisturbed
from tests.spark.programs.ledger import payments
from tests.spark.support import Input

INTERPRETED = {"sql__codegen__wholeStage": False, "sql__codegen__factoryMode": "NO_CODEGEN"}
"""Compiling costs more than it saves for a few rows. Programs that start Spark compile."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    session = cairn.session(
        "tests",
        master="local[2]",
        ui__enabled=False,
        sql__shuffle__partitions=2,
        **({} if os.environ.get("CAIRN_SOAK") else INTERPRETED),
        # Its own: what a test takes away from there is of this session.
        local__dir=str(tmp_path_factory.mktemp("local")),
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def ledger(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A run of the ledger with keys in every key group, to compare others with."""
    return Undisturbed(spark, tmp_path_factory.mktemp("ledger"), payments(8, 100, 127))


@pytest.fixture
def make_input(tmp_path: Path) -> Any:
    """make_input("a bigint, b string") -> a folder of files, each one an epoch."""
    made: list[Input] = []

    def make(schema: str) -> Input:
        made.append(Input(tmp_path / f"input-{len(made)}", schema))
        return made[-1]

    return make
