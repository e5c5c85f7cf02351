"""A shop and its savepoint, for tests of what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.snapshots import write_savepoint
from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.snapshots.writing import HELD, SHOP


@pytest.fixture
def shop() -> Checkpoint:
    checkpoint = Checkpoint(SHOP)
    checkpoint.commit(HELD)
    return checkpoint


@pytest.fixture
def saved(shop: Checkpoint, tmp_path: Path) -> str:
    write_savepoint(shop.store, None, str(tmp_path / "old"))
    return str(tmp_path / "old")
