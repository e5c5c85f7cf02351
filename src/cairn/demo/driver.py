"""The driver under test: a child process that runs the fraud job, and can be killed.

Always true here:
- only processes of this demo get signals: its slots have their own runtime folder, and a process
  id counts only together with its start time;
- after the block the driver has ended, and the JVM and slots end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from cairn.demo import fraud
from cairn.driver import class_archive
from cairn.slot.folders import Living, living_slots

STOP_PATIENCE_S = 90.0
LEASE = "2s"
# These JVMs live for half a minute: optimizations for long runs are off.
SHORT_LIFE = {
    "spark.driver.extraJavaOptions": "-Xss8m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
}


class Slot:
    """A slot process of the driver."""

    def __init__(self, subtask: int, process: psutil.Process) -> None:
        self.subtask = subtask
        self.process = process

    def cpu_s(self) -> float:
        """Return the processor time so far. It grows only while the slot works on an epoch."""
        try:
            times = self.process.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def kill(self) -> None:
        self.process.kill()


class Driver:
    """`cairn run` on the fraud job: it leads the job, or waits as a hot standby."""

    def __init__(
        self, folder: Path, runtime: Path, *, parallelism: int, name: str = "driver"
    ) -> None:
        self._name = name
        self._folder = folder
        self._runtime = runtime
        self._parallelism = parallelism
        self._child: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._child is not None and self._child.poll() is None:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._child is not None, "the driver has been started"
        return self._child.pid

    @property
    def log(self) -> Path:
        return self._folder / f"{self._name}-{self.starts}.log"

    def start(self) -> None:
        self.starts += 1
        command = [sys.executable, "-m", "cairn", "run", f"{fraud.__file__}:build", "--json"]
        command += ["--checkpoint", str(self._folder / "checkpoint")]
        command += ["--parallelism", str(self._parallelism)]
        command += ["--ha", f"store:?lease={LEASE}", "--standby", "hot"]
        command += ["--master", f"local[{self._parallelism}]", "--trigger", "0 seconds"]
        for name, value in SHORT_LIFE.items():
            command += ["--conf", f"{name}={value}"]
        command += ["--", str(self._folder / "payments"), str(self._folder / "out")]
        with self.log.open("wb") as log, (self._folder / "epochs.json").open("ab") as epochs:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=epochs,
                stderr=log,
                env={
                    **os.environ,
                    "CAIRN_RUNTIME_DIR": str(self._runtime),
                    # Making the archive would slow down the comparison that follows.
                    class_archive.VARIABLE: "0",
                },
                # Ctrl-C in the terminal ends the demo, which then ends its driver.
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        assert self._child is not None, "the driver has been started"
        return self._child.poll()

    def slots(self) -> list[Slot]:
        """Return the living slots of this driver, by subtask."""
        executors = {child.pid for child in psutil.Process(self.pid).children()}
        found = []
        for living in _find_living(self._runtime):
            with contextlib.suppress(psutil.Error):  # It may have ended meanwhile.
                if living.executor_pid in executors:
                    found.append(Slot(living.slot, psutil.Process(living.process.pid)))
        return sorted(found, key=lambda slot: slot.subtask)

    def kill(self) -> None:
        """Kill it with SIGKILL, as the out-of-memory killer does."""
        assert self._child is not None, "the driver has been started"
        self._child.kill()
        self._child.wait()

    def stop(self) -> int:
        """Send one Ctrl-C, and return the exit code."""
        assert self._child is not None, "the driver has been started"
        self._child.send_signal(signal.SIGINT)
        return self._child.wait(STOP_PATIENCE_S)

    def log_tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").rstrip()
        return "\n".join(text.splitlines()[-lines:])


def wait_for_leftovers(runtime: Path, patience_s: float = 20.0) -> int:
    """Wait for the slots to end, seconds after their JVM, and return how many still live."""
    deadline = time.monotonic() + patience_s
    while True:
        alive = len(_find_living(runtime))
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.2)


def _find_living(runtime: Path) -> list[Living]:
    return [living for run in runtime.glob("*") for living in living_slots(run)]
