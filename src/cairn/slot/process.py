"""The slot as an operating-system process: how it is started, found and ended.

A forwarder that finds no living slot starts one, under a file lock, so that there is
one per run, executor and number: forked by the executor's nursery, or else as a process
of its own. It is independent of the Python worker that started it and ends by itself: when
told so, when its executor's JVM is gone, when another process has taken its place, or when nobody
has called for a while. `folders` has the layout on disk.

Always true here:
- every process has a folder of its own, so one that is closing is in no other's way;
- a slot that ends gives up its pid file before anything else, so the next forwarder
  that needs it starts another one;
- a slot never outlives its executor by more than a few seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.process_identity import (
    ProcessIdentity,
    identify,
    is_jvm,
    parent_of,
    parse_identity,
)
from cairn.protocol.messages import End, Token
from cairn.runtime_folder import hold, hold_made, runtime_root
from cairn.slot.folders import (
    Living,
    bound_log,
    check_socket_path,
    executor_name,
    keep_excess,
    link_log,
    living_slot,
    living_slots,
    make_scratch,
    read_excess,
    remove_dead,
    remove_process,
    run_folder,
)
from cairn.slot.nursery import fork_slot, start_ahead, start_detached

if TYPE_CHECKING:
    from cairn.slot.server import SlotServer

POLL_S = 0.5
LEASE_S = 3600.0
START_TIMEOUT_S = 60.0
CLOSE_PATIENCE_S = 10.0
END_TIMEOUT_S = 5.0

_executor: ProcessIdentity | None = None


def executor_process() -> ProcessIdentity:
    """Return the JVM this Python worker works for."""
    global _executor
    # Remembered: a worker that has lost the daemon between them still serves the same JVM.
    if _executor is None or not _executor.is_alive:
        _executor = _find_executor()
    return _executor


def _find_executor() -> ProcessIdentity:
    # In a container without an init the JVM may be process 1, so an id says nothing.
    pid = parent_of(os.getpid())
    while pid and not is_jvm(pid):
        pid = parent_of(pid)
    if not pid:
        # The daemon between worker and JVM has died, so nobody would tell us of the JVM's end.
        raise RuntimeError("this Python worker has lost its executor; the task must run again")
    return identify(pid)


def _nursery_home(executor: ProcessIdentity) -> Path:
    return runtime_root() / f"nursery-{executor_name(executor)}"


def start_nursery(executor_pid: int) -> None:
    """Start the nursery of an executor before its first slot is needed; nobody waits for it."""
    executor = identify(executor_pid)

    def start() -> None:
        with contextlib.suppress(OSError):  # The first slot tries again, and logs why it fails.
            start_ahead(_nursery_home(executor), executor)

    threading.Thread(target=start, daemon=True, name="nursery").start()


class SlotHome:
    """The place of a slot, where its processes live one after the other."""

    def __init__(self, run_id: str, executor: ProcessIdentity, slot: int) -> None:
        self.executor = executor
        self.slot = slot
        name = executor_name(executor)
        self.folder = run_folder(run_id) / name
        self.nursery = _nursery_home(executor)
        self.link = self.folder / f"slot-{slot}"
        self.log = self.folder / f"slot-{slot}.log"

    @property
    def executor_label(self) -> str:
        """The executor as people know it: `host:pid`."""
        return _label(self.executor)

    @property
    def excess(self) -> str:
        """The last report of a slot that is near its limit of memory; "" if there is none."""
        return read_excess(self.link)

    def find(self) -> Living | None:
        return living_slot(self.link)

    def start(self) -> Living:
        """Make sure a slot lives here: found, or started and ready to be called."""
        with hold_made(self.folder), self.link.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            living = self.find()
            if living is not None:
                return living
            remove_dead(self.folder)
            folder = self.folder / f"p-{secrets.token_hex(4)}"
            check_socket_path(folder)
            folder.mkdir(mode=0o700)
            link_log(self.log, self.executor.pid)
            # From here on this is the slot: a process that was started before and is late ends.
            fresh = folder / "link"
            fresh.symlink_to(folder.name)
            fresh.replace(self.link)
            pid = self._fork(folder)
            with contextlib.suppress(ProcessLookupError):
                process = identify(pid)
                deadline = time.monotonic() + START_TIMEOUT_S
                while process.is_alive and time.monotonic() < deadline:
                    living = self.find()
                    if living is not None:
                        return living
                    time.sleep(0.005)
            raise RuntimeError(f"slot did not start; log: {self.log}")

    def _fork(self, folder: Path) -> int:
        arguments = ["--directory", str(folder), "--slot", str(self.slot)]
        arguments += ["--executor", str(self.executor)]
        try:
            return fork_slot(self.nursery, self.executor, arguments, self.log)
        except OSError as error:
            with self.log.open("a") as log:
                print(f"no nursery: {error}", file=log)
            command = [sys.executable, "-m", "cairn.slot.process", *arguments]
            return start_detached(command, self.log).pid


def start_slot(run_id: str, slot: int, executor_pid: int | None = None) -> None:
    """Make sure that a slot lives beside an executor; in a Python worker: its own."""
    executor = executor_process() if executor_pid is None else identify(executor_pid)
    home = SlotHome(run_id, executor, slot)
    if home.find() is None:
        home.start()


def end_slots(run_id: str, keep: Collection[str] = (), as_of: Token | None = None) -> int:
    """End the slots of a run on this machine; return how many.

    Those in `keep` stay, by the ids of their processes. With `as_of`, so do those that have begun
    something later, or nothing yet.
    """
    import pyarrow.flight as flight

    ended = 0
    order = msgspec.msgpack.encode(End(as_of))
    for living in living_slots(run_folder(run_id)):
        if living.folder.name in keep:
            continue
        try:
            with flight.connect(living.location) as client:
                options = flight.FlightCallOptions(timeout=END_TIMEOUT_S)
                (answer,) = client.do_action(flight.Action("end", order), options)
            ended += msgspec.msgpack.decode(answer.body.to_pybytes(), type=bool)
        except flight.FlightError:
            pass  # Gone already, or going: it watches its executor and its lease.
    return ended


def _watch(server: SlotServer, executor: ProcessIdentity, link: Path, log: Path) -> str:
    """Wait for the end of the slot; return why it ends."""
    from cairn.logs import logger

    idle_collected = True
    noted = ""
    lease = lease_s()
    while True:
        if server.ended.wait(POLL_S):
            return "told to end"
        if not executor.is_alive:
            return "the executor is gone"
        if _is_replaced(link, server.slot_id):
            return "another process has taken its place"
        idle_s = server.idle_s()
        if idle_s > lease and server.leave_if_idle(lease):
            return f"idle for {idle_s:.0f} s"
        if idle_s < POLL_S:
            idle_collected = False
        elif idle_s > 10 and not idle_collected:
            gc.collect()
            idle_collected = True
        bound_log(log)
        excess = server.runtime.memory_excess()
        if excess and not noted:
            logger.warning("%s %s", link.name, excess)
        # If the slot is killed, its last note counts: states may have grown since the first one.
        if excess != noted:
            keep_excess(link.parent / server.slot_id, excess)
        noted = excess


def _label(executor: ProcessIdentity) -> str:
    return f"{os.uname().nodename}:{executor.pid}"


def _is_replaced(link: Path, slot_id: str) -> bool:
    try:
        return os.readlink(link) != slot_id
    except OSError:
        return False


def lease_s() -> float:
    """Return how long a slot that nobody calls stays."""
    return float(os.environ.get("CAIRN_SLOT_LEASE_S") or LEASE_S)


def live(arguments: Sequence[str] | None = None) -> None:
    """Run a slot, from its start to the end of this process."""
    parser = argparse.ArgumentParser(prog="cairn slot", description="A slot; started by cairn.")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--executor", type=parse_identity, required=True)
    options = parser.parse_args(arguments)

    from cairn.logs import configure_slot, logger
    from cairn.slot.memory import keep_memory
    from cairn.slot.server import SlotServer

    # State is millions of long-lived objects without cycles. Left on, the collector
    # walks them over and over and doubles the cost of an epoch.
    gc.disable()
    keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    configure_slot("text")
    directory: Path = options.directory
    executor: ProcessIdentity = options.executor
    link = directory.parent / f"slot-{options.slot}"
    log = link.with_suffix(".log")
    # Held for life: what lies here is in use, however old it is.
    hold(directory.parent)
    scratch = make_scratch(directory, options.slot)
    server = SlotServer(
        f"grpc+unix://{directory / 'socket'}",
        executor=_label(executor),
        log=str(log),
        scratch=str(scratch),
        directory=str(directory),
    )
    (directory / "pid.new").write_text(str(identify()))
    (directory / "pid.new").rename(directory / "pid")
    threading.Thread(target=server.serve, daemon=True, name="serve").start()
    why = _watch(server, executor, link, log)
    server.leave()
    logger.info("%s ends: %s", link.name, why)
    try:
        if why == "told to end":
            # A user's close() might never return.
            closing = threading.Thread(target=server.runtime.close, daemon=True, name="close")
            closing.start()
            closing.join(CLOSE_PATIENCE_S)
        remove_process(directory)
    finally:
        # Not through the interpreter's end: threads of the transport may still be blocked.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    live()
