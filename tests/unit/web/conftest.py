from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.web.sites import make_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def checkpoint(folder: Path) -> Checkpoint:
    return make_checkpoint(folder)
