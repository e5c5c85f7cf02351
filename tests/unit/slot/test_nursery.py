"""Slots are forked by the nursery of their executor; without one they start all the same."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.runtime_folder import runtime_root
from cairn.slot import nursery, process
from tests.unit.slot.executors import eventually, executor, is_gone

__all__ = ["executor"]


def test_slots_have_one_nursery_live_on_without_it_and_end_with_their_executor(executor) -> None:
    first, second = executor.slot(0), executor.slot(1)
    parent = first.parent()
    assert "cairn.slot.nursery" in " ".join(parent.cmdline())
    assert second.parent() == parent and first.pid != second.pid
    assert first.name() == "cairn-slot-0"
    parent.kill()
    assert eventually(lambda: is_gone(parent))
    third = executor.slot(2)
    assert not is_gone(first) and not is_gone(second)
    assert "cairn.slot.nursery" in " ".join(third.parent().cmdline())
    assert "no nursery" not in executor.log(2)
    later = third.parent()
    executor.end()
    assert eventually(lambda: all(map(is_gone, (first, second, third, later))))
    assert not (executor.home(0).nursery / "socket").exists()


def test_a_slot_that_was_killed_is_collected_and_started_again(executor) -> None:
    first = executor.slot(0)
    first.kill()
    # Not even a zombie stays.
    assert eventually(lambda: not psutil.pid_exists(first.pid))
    assert executor.slot(0).pid != first.pid


def test_a_nursery_removes_what_ended_runs_have_left(executor) -> None:
    left = runtime_root() / "0123456789ab" / "4242-1-0"
    (left / "p-1" / "scratch").mkdir(parents=True)
    (left / "slot-0.log").write_text("what it said")
    mine = executor.home(0).start()
    assert eventually(lambda: not (left / "p-1").exists())
    assert (left / "slot-0.log").read_text() == "what it said"
    assert mine.folder.exists() and mine.process.is_alive


def test_a_slot_has_the_lease_of_who_asked_for_it(executor, monkeypatch) -> None:
    lasting = executor.slot(0)
    monkeypatch.setenv("CAIRN_SLOT_LEASE_S", "0.2")
    brief = executor.slot(1)
    assert eventually(lambda: is_gone(brief))
    assert "idle for" in executor.log(1)
    assert not is_gone(lasting) and not is_gone(lasting.parent())


def test_a_nursery_that_nobody_asks_for_long_ends_without_its_slots(executor, monkeypatch) -> None:
    monkeypatch.setenv("CAIRN_SLOT_LEASE_S", "0.2")
    home = executor.home(0)
    home.nursery.mkdir()
    nursery._start(home.nursery, home.executor)
    monkeypatch.delenv("CAIRN_SLOT_LEASE_S")
    slot = executor.slot(0)
    assert eventually(lambda: not (home.nursery / "socket").exists())
    assert not is_gone(slot)
    assert not is_gone(executor.slot(1))


def test_a_nursery_whose_place_is_taken_ends_and_leaves_the_others_socket_alone(executor) -> None:
    slot = executor.slot(0)
    replaced = slot.parent()
    address = executor.home(0).nursery / "socket"
    address.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(address))
        assert eventually(lambda: is_gone(replaced))
    assert address.exists() and not is_gone(slot)


def test_without_a_nursery_a_slot_starts_as_a_process_of_its_own(executor) -> None:
    home = executor.home(0)
    home.nursery.write_text("in the way")
    slot = executor.slot(0)
    assert "cairn.slot.process" in " ".join(slot.cmdline())
    assert "no nursery" in executor.log(0)


def test_a_slot_that_cannot_start_is_told_with_its_log(executor) -> None:
    executor.slot(0)
    home = executor.home(1)
    home._fork = lambda folder: nursery.fork_slot(  # type: ignore[method-assign]
        home.nursery, home.executor, ["--nonsense"], home.log
    )
    with pytest.raises(RuntimeError, match=r"did not start; log: .*slot-1\.log"):
        home.start()
    assert "required: --directory" in home.log.read_text()


def test_a_caller_that_makes_no_sense_does_not_end_the_nursery(executor) -> None:
    parent = executor.slot(0).parent()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(executor.home(0).nursery / "socket"))
        caller.sendall(b"nonsense")
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(10) == b""
    assert executor.slot(1).parent() == parent


def become(
    order: dict[str, Any], found: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, dict[str, Any]]:
    """What a fork finds as a slot, and the process id that its caller is told."""

    def live(arguments: list[str]) -> None:
        import numpy as np

        facts = {
            "arguments": arguments,
            "folder": os.getcwd(),
            "path": sys.path,
            "environment": dict(os.environ),
            "drawn": int(np.random.randint(2**31)),
        }
        os.write(1, b"from the slot")
        found.write_text(json.dumps(facts))
        os._exit(0)

    monkeypatch.setattr(process, "live", live)
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            nursery._become_slot(order, there)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    there.close()
    with here:
        assert int(here.recv(64)) == pid
    return pid, json.loads(found.read_text())


def test_a_fork_is_as_a_process_that_was_started_where_it_was_asked_for(
    tmp_path, monkeypatch
) -> None:
    order = {
        "arguments": ["--some", "thing"],
        "log": str(tmp_path / "slot-3.log"),
        "environment": {"ONLY": "this ü"},
        "folder": str(tmp_path),
        "path": ["/one", "/two"],
    }
    _, facts = become(order, tmp_path / "found", monkeypatch)
    drawn = facts.pop("drawn")
    assert facts == {name: order[name] for name in facts}
    assert "from the slot" in (tmp_path / "slot-3.log").read_text()
    # Two slots of one nursery draw different numbers.
    assert become(order, tmp_path / "found", monkeypatch)[1]["drawn"] != drawn
