"""A slot that uses nearly all of its memory is reported, with its largest states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cairn.slot import runtime as runtimes
from cairn.slot.memory import describe_excess
from tests.unit.driver.coordinator.leads import Lead

MB = 1 << 20


def test_private_memory_grows_with_what_is_held() -> None:
    # In a process of its own: other tests have freed memory here, which arrays could take.
    program = (
        "import numpy as np\n"
        "from cairn.slot.memory import private_bytes\n"
        "before = private_bytes()\n"
        f"held = np.ones({64 * MB}, np.uint8)\n"
        "print(private_bytes() - before)\n"
    )
    grown = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert int(grown) > 48 * MB


def test_nothing_is_said_below_the_limit_or_without_one() -> None:
    assert describe_excess(899 * MB, 1000 * MB, {"count": 5}) == ""
    assert describe_excess(899 * MB, 0, {"count": 5}) == ""


def test_the_largest_states_are_named() -> None:
    held = {"a": 1, "b": 4000, "c": 30, "d": 2}
    assert describe_excess(950 * MB, 1000 * MB, held) == (
        "uses 950 of 1,000 MiB; largest states: b (4,000 entries), c (30 entries), d (2 entries)"
    )


def test_a_slot_names_its_states_by_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    lead = Lead(tmp_path).start()
    epoch = lead.run_batch((1, 1), (2, 1))
    (slot,) = lead.slots.values()
    assert slot.memory_excess() == "", "no limit is set"
    slot.spec = replace(slot.spec, slot_memory_bytes=100 * MB)
    monkeypatch.setattr(runtimes, "private_bytes", lambda: 99 * MB)
    held = epoch.metrics.operators["count"].state_entries
    text = f"uses 99 of 100 MiB; largest states: count ({held} entries)"
    assert held and slot.memory_excess() == text
