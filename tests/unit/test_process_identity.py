"""A process is known by its id and its start, whatever the wall clock does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cairn import process_identity
from cairn.process_identity import ProcessIdentity, identify, parse_identity
from cairn.slot import process


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine whose processes are made up: proc(pid, parent, name)."""
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(process_identity, "PROC", tmp_path)
    monkeypatch.setattr(process, "_executor", None)

    def add(pid: int, parent: int, name: str, *, state: str = "S", started: int = 100) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        rest = " ".join(["0"] * 17)
        (tmp_path / str(pid) / "stat").write_text(
            f"{pid} ({name}) {state} {parent} {rest} {started} 0\n"
        )

    return add


def test_identity_is_text_and_comes_back() -> None:
    own = identify()
    assert own.pid == os.getpid() and own.is_alive
    assert parse_identity(str(own)) == own


@pytest.mark.parametrize("step_s", [-3600.0, -1.0, 0.01, 1.0, 3600.0])
def test_a_step_of_the_wall_clock_changes_no_identity(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = identify()
    boot_s = psutil.boot_time()
    created_s = psutil.Process().create_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_s + step_s)
    # This is what moves, and what an identity is not made of.
    assert psutil.Process().create_time() != created_s
    assert own.is_alive and identify() == own


def test_another_process_of_the_same_id_is_another_one(proc: Callable[..., None]) -> None:
    proc(7, 1, "java", started=100)
    first = identify(7)
    proc(7, 1, "java", started=101)
    assert not first.is_alive and identify(7).is_alive


def test_a_process_that_only_waits_to_be_collected_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    dead = identify(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not dead.is_alive
    child.wait()
    assert not dead.is_alive
    with pytest.raises(ProcessLookupError):
        identify(child.pid)


def test_a_name_with_spaces_and_parentheses_does_not_hide_the_start(
    proc: Callable[..., None],
) -> None:
    proc(7, 3, "odd) S (name", started=42)
    assert identify(7) == ProcessIdentity(7, 42)
    assert process_identity.parent_of(7) == 3


def test_without_proc_a_process_is_known_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_identity, "PROC", tmp_path / "none")
    own = identify()
    assert own.is_alive and own.pid == os.getpid()
    assert not own._replace(started=own.started + 1).is_alive
    assert process_identity.parent_of(os.getpid()) == os.getppid()
    assert process_identity.pid_namespace() == "0"


# The executor of a Python worker


def test_the_executor_is_the_jvm_above_the_worker(proc: Callable[..., None]) -> None:
    own = os.getpid()
    proc(own, 50, "python3.11")
    proc(50, 40, "sh")
    proc(40, 30, "python3.11")
    proc(30, 20, "java", started=77)
    proc(20, 1, "python3.11")
    assert process.executor_process() == ProcessIdentity(30, 77)


def test_a_jvm_that_is_process_1_is_an_executor(proc: Callable[..., None]) -> None:
    proc(os.getpid(), 40, "python3.11")
    proc(40, 1, "python3.11")
    proc(1, 0, "java", started=5)
    assert process.executor_process() == ProcessIdentity(1, 5)


@pytest.mark.parametrize("init", ["systemd", "tini", "bash"])
def test_a_worker_that_an_init_has_adopted_has_lost_its_executor(
    init: str, proc: Callable[..., None]
) -> None:
    proc(os.getpid(), 900 if init == "systemd" else 1, "python3.11")
    proc(900, 1, "systemd")  # A user's own, which adopts too.
    proc(1, 0, init)
    with pytest.raises(RuntimeError, match="lost its executor"):
        process.executor_process()


def test_a_worker_that_has_lost_its_daemon_still_has_the_executor_it_knew(
    proc: Callable[..., None],
) -> None:
    proc(os.getpid(), 40, "python3.11")
    proc(40, 30, "python3.11")
    proc(30, 1, "java")
    proc(1, 0, "systemd")
    known = process.executor_process()
    proc(os.getpid(), 1, "python3.11")
    assert process.executor_process() == known


def test_in_a_pid_namespace_of_its_own_a_jvm_that_is_process_1_is_found(tmp_path: Path) -> None:
    """For real: the first process of the namespace is called java, its grandchild looks for it."""
    (tmp_path / "java").symlink_to(sys.executable)
    worker = "from cairn.slot.process import executor_process as e; print(e().pid, e().is_alive)"
    daemon = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', {worker!r}])"
    jvm = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {daemon!r}])"
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHOME": sys.base_prefix}
    try:
        done = subprocess.run(
            [*command, str(tmp_path / "java"), "-c", jvm],
            env={**os.environ, **path},
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"namespaces cannot be made here: {done.stderr.strip()}")
    assert done.stdout.split() == ["1", "True"], done.stderr


def test_names_and_paths_that_are_no_text_are_read_all_the_same(
    tmp_path: Path, proc: Callable[..., None]
) -> None:
    proc(7, 1, "x")
    stat = tmp_path / "7" / "stat"
    stat.write_bytes(stat.read_bytes().replace(b"(x)", b"(job-\xc3)"))
    (tmp_path / "7" / "maps").write_bytes(b"7f00 r-xp /opt/\xff/libjvm.so\n")
    assert identify(7) == ProcessIdentity(7, 100)
    assert process_identity.is_jvm(7)


def test_a_process_without_a_file_to_spare_takes_no_other_for_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = identify()

    def refuse(path: Path, *_: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert own.is_alive
