"""The places of all sinks, each in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.places import PLACES
from tests.places.stage import Stage


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = PLACES[request.param](tmp_path)
    stage = Stage(made)
    yield stage
    stage.close_all()
    made.close()
