"""Places in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.places import PLACES
from tests.places.postgres import PostgresPlace


@pytest.fixture(params=[name for name in PLACES if name.startswith("postgres")])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = PLACES[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def append(tmp_path: Path) -> Iterator[PostgresPlace]:
    made = PostgresPlace(tmp_path)
    yield made
    made.close()
