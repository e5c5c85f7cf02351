"""The runtime folder is private, keeps what is in use, and gives up what is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cairn import runtime_folder
from cairn.runtime_folder import hold, hold_made, runtime_root
from cairn.slot import folders
from cairn.slot.folders import (
    LOGS_KEPT_S,
    keep_excess,
    link_log,
    living_slots,
    read_excess,
    sweep,
)

STRANGER = 54321


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAIRN_RUNTIME_DIR", str(tmp_path / "r"))
    return runtime_root()


def fill(folder: Path) -> None:
    """As slots leave it: state of a process, and a log."""
    (folder / "p-1" / "scratch").mkdir(parents=True)
    (folder / "p-1" / "scratch" / "1.sst").write_text("state")
    (folder / "slot-0").symlink_to("p-1")
    (folder / "slot-0.lock").touch()
    (folder / "slot-0.log").write_text("why it failed")


# Whose it is


def test_runtime_folder_is_made_for_this_user_alone(root: Path) -> None:
    assert root.stat().st_mode & 0o777 == 0o700
    assert runtime_root() == root


def test_runtime_folder_that_others_can_enter_is_refused(root: Path) -> None:
    root.chmod(0o750)
    with pytest.raises(PermissionError, match=r"mode is drwxr-x---\n  next: `chmod 700 "):
        runtime_root()


def test_runtime_folder_may_be_a_link_that_this_user_made(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))
    root.symlink_to("elsewhere")
    assert runtime_root() == root


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_link_that_another_user_has_planted_is_refused_wherever_it_leads(root: Path) -> None:
    root.rename(root.with_name("private"))
    root.symlink_to("private")
    os.lchown(root, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
        runtime_root()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("is_link", [True, False])
def test_a_folder_of_another_user_is_refused(root: Path, is_link: bool) -> None:
    if is_link:
        root.rename(root.with_name("theirs"))
        root.symlink_to("theirs")
    os.chown(root, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
        runtime_root()


def test_a_socket_path_that_is_too_long_is_refused_with_the_way_out(root: Path) -> None:
    folders.check_socket_path(root)
    with pytest.raises(OSError, match="CAIRN_RUNTIME_DIR to a shorter path"):
        folders.check_socket_path(root / ("x" * 100))


# Leftovers of runs


RUN = "0123456789ab"
EXECUTOR = "4242-99-fffffc"


def test_state_of_an_ended_run_goes_and_its_log_stays_for_a_week(root: Path) -> None:
    folder = root / RUN / EXECUTOR
    fill(folder)
    sweep(root, time.time())
    assert not (folder / "p-1").exists()
    assert (folder / "slot-0.log").read_text() == "why it failed"
    sweep(root, time.time() + LOGS_KEPT_S / 2)
    assert (folder / "slot-0.log").exists()
    sweep(root, time.time() + LOGS_KEPT_S + 60)
    assert not (root / RUN).exists()


def test_where_a_process_lives_nothing_is_swept_however_old_it_is(root: Path) -> None:
    """By its lock: processes of another container have ids that mean nothing here."""
    folder = root / RUN / EXECUTOR
    fill(folder)
    lock = hold(folder)
    sweep(root, time.time() + 10 * LOGS_KEPT_S)
    assert (folder / "p-1" / "scratch" / "1.sst").exists() and (folder / "slot-0.log").exists()
    os.close(lock)
    sweep(root, time.time() + 10 * LOGS_KEPT_S)
    assert not folder.exists()


def test_old_nurseries_and_logs_of_drivers_go_and_all_else_stays(root: Path) -> None:
    for name in ("nursery-42-7-fffffc", "driver-42-1700000000", "java/bin", "mine"):
        (root / name).mkdir(parents=True)
    sweep(root, time.time() + LOGS_KEPT_S + 60)
    assert sorted(path.name for path in root.iterdir()) == ["java", "mine"]


def test_a_folder_that_is_removed_while_one_waits_for_its_lock_is_made_again(root: Path) -> None:
    folder = root / RUN / EXECUTOR
    real_hold = runtime_folder.hold
    calls = []

    def held_late(at: Path) -> int:
        if not calls:
            descriptor = real_hold(at)
            shutil.rmtree(at)
        else:
            descriptor = real_hold(at)
        calls.append(descriptor)
        return descriptor

    runtime_folder.hold = held_late
    try:
        with hold_made(folder):
            assert folder.is_dir()
    finally:
        runtime_folder.hold = real_hold
    assert len(calls) == 2


def test_a_run_folder_that_is_removed_while_an_executors_is_made_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, removed = Path.mkdir, []

    def swept(folder: Path, *args: Any, **options: Any) -> None:
        if not removed:
            removed.append(folder)
            raise FileNotFoundError(folder)
        mkdir(folder, *args, **options)

    folder = runtime_root() / "0123456789ab" / "1-2-3"
    monkeypatch.setattr(Path, "mkdir", swept)
    with hold_made(folder):
        assert removed == [folder] and folder.is_dir()


def test_a_link_to_nothing_and_a_pid_of_nobody_are_no_living_slots(root: Path) -> None:
    folder = root / RUN / EXECUTOR
    fill(folder)
    (folder / "p-1" / "pid").write_text("99999999-1")
    (folder / "slot-1").symlink_to("p-2")
    assert living_slots(root / RUN) == []


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="no systemd here")
def test_systemd_tmpfiles_leaves_alone_what_a_living_slot_holds(root: Path, tmp_path: Path) -> None:
    for run in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        fill(root / run / EXECUTOR)
    lock = hold(root / "aaaaaaaaaaaa" / EXECUTOR)
    rules = tmp_path / "rules.conf"
    rules.write_text(f"e {root} - - - 0\n")  # However young a file is, it is too old.
    subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True, timeout=30)
    living = root / "aaaaaaaaaaaa" / EXECUTOR
    assert (living / "slot-0" / "scratch" / "1.sst").read_text() == "state"
    assert (living / "slot-0.log").exists()
    assert not (root / "bbbbbbbbbbbb").exists(), "this system does clean up"
    os.close(lock)


# Logs


def test_a_log_is_bounded_and_the_newest_output_is_in_it(tmp_path: Path) -> None:
    """Output of the process and of its children is limited together."""
    log = tmp_path / "slot-0.log"
    program = f"""
import subprocess, sys
from pathlib import Path
from cairn.slot.folders import bound_log, redirect_output
log = Path({str(log)!r})
redirect_output(log)
for number in range(100):
    print("line", number, "x" * 100, flush=True)
    subprocess.run(["echo", "child", str(number)]) if number % 30 == 0 else None
    bound_log(log, 2000)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    parts = sorted(tmp_path.glob("slot-0.log*"))
    assert [part.name for part in parts] == ["slot-0.log", "slot-0.log.1"]
    assert all(part.stat().st_size < 2300 for part in parts)
    text = parts[1].read_text() + parts[0].read_text()
    numbers = [int(line.split()[1]) for line in text.splitlines() if line.startswith("line")]
    assert numbers == list(range(numbers[0], 100)) and "child 90" in text


# State on the disks of Spark


def test_state_lies_on_the_local_folders_of_spark_in_turn(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks = [tmp_path / "disk-0", tmp_path / "disk-1"]
    for disk in disks:
        disk.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", ",".join(map(str, disks)))
    for slot in range(3):
        process = root / "run" / "1-2-a" / f"p-{slot}"
        process.mkdir(parents=True)
        scratch = folders.make_scratch(process, slot)
        (scratch / "1.sst").write_text("state")
        assert scratch.resolve().parent == disks[slot % 2]
        assert scratch.stat().st_mode & 0o777 == 0o700


def test_a_local_folder_that_cannot_be_written_to_is_left_out(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / 'missing'},{tmp_path / 'disk'}")
    (root / "p-1").mkdir()
    assert folders.make_scratch(root / "p-1", 0).resolve().parent == tmp_path / "disk"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "missing"))
    (root / "p-2").mkdir()
    assert not folders.make_scratch(root / "p-2", 0).is_symlink()


def test_state_on_another_disk_goes_with_its_executor_and_its_log_stays(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(disk))
    executor = root / ("a" * 12) / "1-2-a"
    (executor / "p-1").mkdir(parents=True)
    (folders.make_scratch(executor / "p-1", 0) / "1.sst").write_text("state")
    (executor / "slot-0.log").write_text("why it failed")
    with hold_made(executor):
        sweep(root, time.time())
        assert list(disk.iterdir()), "a process lives there"
    sweep(root, time.time())
    assert not list(disk.iterdir())
    assert (executor / "slot-0.log").exists()


def test_only_folders_of_slots_are_removed_through_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (root / "p-1").mkdir()
    (root / "p-1" / "scratch").symlink_to(tmp_path / "mine")
    folders.remove_process(root / "p-1")
    assert (tmp_path / "mine").exists() and not (root / "p-1").exists()


# For people


def test_the_memory_of_a_killed_process_is_read_until_it_is_well_again(tmp_path: Path) -> None:
    assert read_excess(tmp_path) == ""
    keep_excess(tmp_path, "uses 99 of 100 MiB")
    assert read_excess(tmp_path) == "uses 99 of 100 MiB"
    keep_excess(tmp_path, "")
    assert read_excess(tmp_path) == ""
    keep_excess(tmp_path / "gone", "uses 99 of 100 MiB")


def test_the_log_of_a_slot_is_linked_from_the_folder_of_its_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, work, yarn = tmp_path / "slot-0.log", tmp_path / "work", tmp_path / "yarn"
    log.write_text("why it failed")
    work.mkdir()
    yarn.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("LOG_DIRS", raising=False)
    link_log(log, os.getpid())
    assert not list(work.iterdir()), "a working folder that Spark writes no output to"
    (work / "stdout").touch()
    (work / "stderr").touch()
    for _ in range(2):
        link_log(log, os.getpid())
    assert (work / "cairn-slot-0.log").read_text() == "why it failed"
    later = tmp_path / "later" / log.name
    later.parent.mkdir()
    later.write_text("of the next run")
    link_log(later, os.getpid())
    assert (work / "cairn-slot-0.log").read_text() == "of the next run"
    monkeypatch.setenv("LOG_DIRS", f"{yarn},{tmp_path}")
    link_log(log, os.getpid())
    assert (yarn / "cairn-slot-0.log").read_text() == "why it failed"
