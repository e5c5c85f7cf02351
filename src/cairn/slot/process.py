"""The slot as an operating-system process: how it is started, found and ended.

    <runtime>/<run>/<executor>/slot-<i>/   socket, lock, pid
    <runtime>/<run>/<executor>/slot-<i>.log

A forwarder that finds no living slot starts one, under a file lock, so that there is
one per run, executor and number: forked by the executor's nursery, or else as a process
of its own. It is detached from the Python worker that asked for it and ends by itself:
when told so, when its executor's JVM is gone (process id *and* start time are compared),
or when nobody has called for a while.

Always true here:
- the directory belongs to this user and no other can enter it;
- a slot never outlives its executor by more than a few seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

from cairn.slot.nursery import detached, fork_slot, is_alive, start_ahead

POLL_S = 0.5
LEASE_S = 3600.0
START_TIMEOUT_S = 60.0
CLOSE_PATIENCE_S = 10.0


def runtime_root() -> Path:
    """Short, because the path of a Unix socket holds about a hundred characters."""
    root = Path(os.environ.get("CAIRN_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.environ.get("CAIRN_RUNTIME_DIR"):
        root = root / f"cairn-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = root.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{root} must belong to this user and be closed to others (0700)")
    return root


_executor: psutil.Process | None = None


def executor_process() -> psutil.Process:
    """The JVM this Python worker works for."""
    global _executor
    # Remembered: a worker that has lost the daemon between them still serves the same JVM.
    if _executor is None or not _executor.is_running():
        _executor = _find_executor()
    return _executor


def _find_executor() -> psutil.Process:
    process = psutil.Process().parent()
    while process is not None and process.pid != 1 and "python" in process.name().lower():
        process = process.parent()
    if process is None or process.pid == 1:
        # The daemon between worker and JVM has died, so nobody would tell us of the JVM's end.
        raise RuntimeError("this Python worker has lost its executor; the task must run again")
    return process


def _executor_name(executor: psutil.Process) -> str:
    return f"{executor.pid}-{int(executor.create_time())}"


def _nursery_home(executor: psutil.Process) -> Path:
    return runtime_root() / f"nursery-{_executor_name(executor)}"


def start_nursery(executor_pid: int) -> None:
    """Start the nursery of an executor before its first slot is needed; nobody waits for it."""
    executor = psutil.Process(executor_pid)
    arguments = (_nursery_home(executor), executor.pid, executor.create_time())

    def start() -> None:
        with contextlib.suppress(OSError):  # The first slot tries again, and logs why it fails.
            start_ahead(*arguments)

    threading.Thread(target=start, daemon=True, name="nursery").start()


class SlotHome:
    """Where a slot lives."""

    def __init__(self, run_id: str, executor: psutil.Process, slot: int) -> None:
        self.executor_pid = executor.pid
        self.executor_started_s = executor.create_time()
        root = runtime_root()
        parent = root / run_id[:12] / _executor_name(executor)
        self.nursery = _nursery_home(executor)
        self.directory = parent / f"slot-{slot}"
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket = self.directory / "socket"
        self.log = parent / f"slot-{slot}.log"

    @property
    def location(self) -> str:
        return f"grpc+unix://{self.socket}"

    def pid(self) -> int | None:
        """The living slot's process id."""
        try:
            text = (self.directory / "pid").read_text()
            pid, started_s = text.split()
            # Until its parent asks how it ended, a dead process keeps its number.
            if is_alive(int(pid), float(started_s)):
                return int(pid)
        except (OSError, ValueError):
            pass
        return None

    def start(self) -> None:
        """Make sure a slot lives here: found, or started and ready to be called."""
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.pid() is not None and self.socket.exists():
                return
            self.socket.unlink(missing_ok=True)
            (self.directory / "pid").unlink(missing_ok=True)
            pid = self._fork()
            started_s = _started_s(pid)
            deadline = time.monotonic() + START_TIMEOUT_S
            while not self.socket.exists() or self.pid() != pid:
                if not is_alive(pid, started_s) or time.monotonic() > deadline:
                    raise RuntimeError(f"slot did not start; log: {self.log}")
                time.sleep(0.005)

    def _fork(self) -> int:
        arguments = ["--directory", str(self.directory)]
        arguments += ["--log", str(self.log), "--executor-pid", str(self.executor_pid)]
        arguments += ["--executor-started", repr(self.executor_started_s)]
        executor = (self.executor_pid, self.executor_started_s)
        try:
            return fork_slot(self.nursery, *executor, arguments, self.log)
        except OSError as error:
            with self.log.open("a") as log:
                print(f"no nursery: {error}", file=log)
            return self._spawn(arguments)

    def _spawn(self, arguments: Sequence[str]) -> int:
        command = [sys.executable, "-m", "cairn.slot.process", *arguments]
        return detached(command, self.log).pid


def _started_s(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0  # Gone already.


def start_slot(run_id: str, slot: int, executor_pid: int | None = None) -> None:
    """Make sure that a slot lives beside an executor; in a Python worker: its own."""
    executor = executor_process() if executor_pid is None else psutil.Process(executor_pid)
    home = SlotHome(run_id, executor, slot)
    if home.pid() is None:
        home.start()


def end_slots(run_id: str, keep: Collection[int] = ()) -> int:
    """Say goodbye to a run's slots on this machine, but for some; how many were there."""
    import pyarrow.flight as flight

    ended = 0
    for socket in (runtime_root() / run_id[:12]).glob("*/slot-*/socket"):
        if int(socket.parent.name.removeprefix("slot-")) in keep:
            continue
        try:
            with flight.connect(f"grpc+unix://{socket}") as client:
                options = flight.FlightCallOptions(timeout=5)
                list(client.do_action(flight.Action("end", b""), options))
            ended += 1
        except flight.FlightError:
            pass  # Gone already, or going: it watches its executor and its lease.
    return ended


def _watch(server: object, pid: int, started_s: float, lease_s: float) -> str:
    """Wait for the end: returns why."""
    idle_collected = True
    while True:
        if server.ended.wait(POLL_S):  # type: ignore[attr-defined]
            return "told to end"
        if not is_alive(pid, started_s):
            return "the executor is gone"
        idle_s = server.idle_s()  # type: ignore[attr-defined]
        if idle_s > lease_s:
            return f"idle for {idle_s:.0f} s"
        if idle_s < POLL_S:
            idle_collected = False
        elif idle_s > 10 and not idle_collected:
            gc.collect()
            idle_collected = True


def lease_s() -> float:
    """How long one that nobody calls stays."""
    return float(os.environ.get("CAIRN_SLOT_LEASE_S") or LEASE_S)


def live(arguments: Sequence[str] | None = None) -> None:
    """The life of a slot, from its start to the end of this process."""
    parser = argparse.ArgumentParser(prog="cairn slot", description="A slot; started by cairn.")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--executor-pid", type=int, required=True)
    parser.add_argument("--executor-started", type=float, required=True)
    options = parser.parse_args(arguments)

    from cairn.logs import configure_slot, logger
    from cairn.slot.server import SlotServer

    # State is millions of long-lived objects without cycles. Left on, the collector
    # walks them over and over and doubles the cost of an epoch.
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    configure_slot("text")
    directory: Path = options.directory
    executor = f"{os.uname().nodename}:{options.executor_pid}"
    scratch = directory / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    server = SlotServer(
        f"grpc+unix://{directory / 'socket'}",
        executor=executor,
        log=options.log,
        scratch=str(scratch),
        directory=str(directory),
    )
    own = psutil.Process()
    (directory / "pid.new").write_text(f"{own.pid} {own.create_time()!r}")
    (directory / "pid.new").rename(directory / "pid")
    threading.Thread(target=server.serve, daemon=True, name="serve").start()
    why = _watch(server, options.executor_pid, options.executor_started, lease_s())
    logger.info("%s ends: %s", directory.name, why)
    with contextlib.suppress(OSError):
        (directory / "socket").unlink(missing_ok=True)
    try:
        if why == "told to end":
            # Of its own accord a thread that waits for a user's close() might never end.
            closing = threading.Thread(target=server.runtime.close, daemon=True, name="close")
            closing.start()
            closing.join(CLOSE_PATIENCE_S)
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        # Not through the interpreter's end: threads of the transport may still be blocked.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    live()
