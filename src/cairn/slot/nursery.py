"""The nursery: a process beside an executor that has loaded what slots need, and forks them.

A new Python process spends half a second on imports; a fork of one that has them loaded
begins at once, and shares their memory. The first slot of an executor starts its nursery.

    <runtime>/nursery-<executor>/   socket, lock, log

Always true here:
- the nursery runs no code of users, opens no state and has no threads of ours, so a fork is safe;
- a slot gets the environment, folder and import path of its requester, as if started alone;
- it ends with its executor, when no request has come for a while, or when callers reach another
  process or none at its address; its slots live on;
- while idle it removes leftovers of ended runs from the runtime folder;
- nothing depends on it: without a nursery, a slot starts as a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cairn.process_identity import ProcessIdentity, parse_identity
from cairn.runtime_folder import hold
from cairn.slot.folders import redirect_output, sweep

POLL_S = 0.5
START_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 10.0
SWEEP_EVERY_S = 3600.0
_PR_SET_NAME = 15


def surroundings() -> dict[str, Any]:
    """Return the environment, folder and import path of this process."""
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": [str(p) for p in sys.path],
    }


def ask(address: Path, arguments: Sequence[str], log: Path) -> int:
    """Have a slot forked; return its process id. Raises OSError if no nursery answers."""
    order = {"arguments": list(arguments), "log": str(log), **surroundings()}
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(ASK_TIMEOUT_S)
        caller.connect(str(address))
        caller.sendall(json.dumps(order).encode())
        caller.shutdown(socket.SHUT_WR)
        answer = caller.recv(64)
    if not answer:
        raise ConnectionError("the nursery did not fork a slot")
    return int(answer)


def fork_slot(home: Path, executor: ProcessIdentity, arguments: Sequence[str], log: Path) -> int:
    """A slot from the nursery of an executor, which is started when it does not live yet."""
    address = home / "socket"
    with contextlib.suppress(OSError):
        return ask(address, arguments, log)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            return ask(address, arguments, log)  # Another has started it meanwhile.
        address.unlink(missing_ok=True)
        _start(home, executor)
        return ask(address, arguments, log)


def start_detached(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this worker and has the same import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )


def start_ahead(home: Path, executor: ProcessIdentity) -> None:
    """Start the nursery of an executor and wait until it takes calls."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "socket").exists():
            _start(home, executor)


def _start(home: Path, executor: ProcessIdentity) -> None:
    command = [sys.executable, "-m", "cairn.slot.nursery", "--home", str(home)]
    command += ["--executor", str(executor)]
    child = start_detached(command, home / "log")
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (home / "socket").exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise ConnectionError(f"the nursery did not start; log: {home / 'log'}")
        time.sleep(0.005)


def _load() -> None:
    """All that slots load before they know their job."""
    import pandas  # noqa: F401  # pyarrow would load it with the first array that is made
    import pyarrow as pa

    import cairn.slot.process
    import cairn.slot.server  # noqa: F401

    pa.array([0])
    gc.collect()
    gc.freeze()


def _become_slot(order: dict[str, Any], caller: socket.socket) -> None:
    """In the fork: everything that differs from slot to slot, then the slot's own life."""
    import numpy as np

    from cairn.slot.process import live

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Slots would all draw the same numbers; Python's own generator takes care of itself.
    np.random.seed()
    redirect_output(Path(order["log"]))
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[:] = order["path"]
    # Seen in `ps` and `top`, where the command is that of the nursery.
    name = Path(order["log"]).stem
    with contextlib.suppress(AttributeError):  # Linux alone has it.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"cairn-{name}".encode(), 0, 0, 0)
    # Sent by the slot itself: a caller with an answer has a slot, even if the nursery dies now.
    caller.sendall(str(os.getpid()).encode())
    caller.close()
    live(order["arguments"])


def _answer(listener: socket.socket) -> None:
    """Fork for one caller."""
    caller, _ = listener.accept()
    with caller:
        caller.settimeout(ASK_TIMEOUT_S)
        parts = list(iter(lambda: caller.recv(65536), b""))
        order = json.loads(b"".join(parts))
        if os.fork():
            return
        try:
            listener.close()
            _become_slot(order, caller)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(1)


def _sweep(root: Path, listener: socket.socket) -> None:
    """Remove what ended runs have left on this machine, unless another nursery is at it."""
    # In a fork: state may be large, and callers must not wait for its removal.
    if os.fork():
        return
    try:
        listener.close()
        with contextlib.suppress(OSError), (root / "sweep.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweep(root, time.time())
    finally:
        os._exit(0)


def _is_at(address: Path, own: os.stat_result) -> bool:
    """True if a socket is the one at an address: another nursery may have put its own there."""
    try:
        return os.path.samestat(own, address.stat())
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="cairn nursery", description="Forks slots.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--executor", type=parse_identity, required=True)
    options = parser.parse_args()

    from cairn.slot.process import lease_s

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load()
    # Nobody waits for the slots: they are collected as they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Held for life: this folder is in use, however old it is.
    hold(options.home)
    address: Path = options.home / "socket"
    unready = options.home / "socket.new"
    unready.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(unready))
        listener.listen(64)
        # Renamed when it listens: a socket that is only bound refuses callers.
        unready.rename(address)
        own = address.stat()
        listener.settimeout(POLL_S)
        asked = time.monotonic()
        swept: float | None = None
        while options.executor.is_alive and _is_at(address, own):
            try:
                _answer(listener)
                asked = time.monotonic()
            except TimeoutError:
                if time.monotonic() - asked > lease_s():
                    break
                if swept is None or time.monotonic() - swept > SWEEP_EVERY_S:
                    swept = time.monotonic()
                    with contextlib.suppress(OSError):  # No process can be forked now.
                        _sweep(options.home.parent, listener)
            except (OSError, ValueError) as error:
                print(f"a caller got no slot: {error!r}", flush=True)
        if _is_at(address, own):
            address.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
