"""A coordinator that leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.driver.coordinator.leads import Lead


@pytest.fixture
def lead(tmp_path: Path) -> Lead:
    return Lead(tmp_path).start()
