"""Small limits, so that a short simulation merges, rebases, packs and collects."""

from __future__ import annotations

import pytest

from cairn.driver.coordinator import compaction, epoch
from cairn.protocol import parts
from cairn.slot import records
from cairn.storage import manifest, source_logs


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "FAN_IN", 3)
    monkeypatch.setattr(compaction, "BASE_BYTES_MIN", 15_000)
    monkeypatch.setattr(epoch, "INLINE_BYTES_MAX", 3_000)
    # Of one subtask in the message, of several in an object.
    monkeypatch.setattr(parts, "INLINE_BYTES_MAX", 400)
    monkeypatch.setattr(manifest, "FULL_EVERY", 5)
    monkeypatch.setattr(source_logs, "LINES_BYTES_MAX", 120)
    # A few rows of a batch are processed while the state of the next ones is read.
    monkeypatch.setattr(records, "AHEAD_ROWS", 3)
