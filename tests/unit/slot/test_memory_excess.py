"""A slot that uses nearly all of its memory is reported, with its largest states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cairn.errors import EpochError
from cairn.protocol.messages import Begin
from cairn.sinks.base import Execution
from cairn.slot import runtime as runtimes
from cairn.slot.memory import Room, describe_excess
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
    text = describe_excess(950 * MB, 1000 * MB, held)
    first, _, advice = text.partition("\n")
    assert first == (
        "uses 950 of 1,000 MiB; largest states: b (4,000 entries), c (30 entries), d (2 entries)"
    )
    assert "next: more subtasks, a larger slot_memory_mb" in advice and "rocksdb" in advice
    on_disk = describe_excess(950 * MB, 1000 * MB, held, is_heap=False)
    assert "a smaller backend_memory_mb" in on_disk and "rocksdb" not in on_disk


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
    assert held and slot.memory_excess().startswith(text)


def begin(attempt: int = 0, *, is_divisible: bool = True) -> Begin:
    return Begin(
        execution=Execution(0, attempt), is_divisible=is_divisible,
        run_id="r", term=1, epoch=5, parent=4, now_ms=7, watermark_ms=3, parallelism=2,
        group_count=2, inline_bytes_max=9,
    )  # fmt: skip


def fill(room: Room, used: list[int], began: Begin, *sizes: int) -> None:
    used[0] = sizes[0]
    room.begin(began)
    for size in sizes[1:]:
        used[0] = size
        room.check(began)


def test_an_attempt_that_fills_the_memory_is_stopped_if_it_can_be_divided() -> None:
    used = [0]
    room = Room(100 * MB, lambda: used[0] * MB)
    fill(room, used, begin(), 50, 89)
    fill(room, used, begin(1, is_divisible=False), 50, 99)
    with pytest.raises(EpochError, match="a slot uses 90 of 100 MiB") as raised:
        fill(room, used, begin(2), 50, 90)
    assert raised.value.facts["is_full"]


def test_a_task_that_runs_again_is_refused_before_it_reads_rows_and_the_next_attempt_is_not() -> (
    None
):
    used = [0]
    room = Room(100 * MB, lambda: used[0] * MB)
    with pytest.raises(EpochError):
        fill(room, used, begin(), 50, 95)
    with pytest.raises(EpochError, match="with fewer rows at a time"):
        room.begin(begin())
    fill(room, used, begin(attempt=1), 50, 80)


def test_all_levels_of_an_execution_count_together() -> None:
    used = [0]
    room = Room(100 * MB, lambda: used[0] * MB)
    fill(room, used, begin(), 50, 84)
    with pytest.raises(EpochError):
        fill(room, used, begin(), 84, 91)


def test_state_that_fills_the_memory_by_itself_stops_nothing() -> None:
    """Fewer rows at a time would not help."""
    used = [0]
    room = Room(100 * MB, lambda: used[0] * MB)
    fill(room, used, begin(), 85, 94)
    fill(Room(0, lambda: used[0] * MB), used, begin(), 85, 1000)
