"""A driver in a process of its own, that is started, told things, killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.spark.attached import Attachment
from tests.spark.support import ROOT, slot_pids


class Driver:
    """Runs `tests.spark.programs.outputs`; what it reports is read as it comes.

    It starts its own Spark, or runs on that of `on`, which outlives it.
    """

    def __init__(self, folder: Path, *arguments: Any, on: Any = None, **environment: str) -> None:
        self._attachment = None if on is None else Attachment(on)
        if self._attachment is not None:
            environment |= self._attachment.environment
        runner = [] if on is None else ["tests.spark.attached"]
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.reports: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._over = False
        logs = folder / "drivers"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{len(list(logs.iterdir())):03d}.log"
        command = [
            *(sys.executable, "-m", *runner, "tests.spark.programs.outputs"),
            *(folder, *arguments),
        ]
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                # The last line of one that is killed may be a part of one.
                with self._news, contextlib.suppress(ValueError):
                    self.reports.append(json.loads(line))
                    self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        """The first report with these values; `...` is any."""
        for each in list(self.reports):
            if all(k in each and v in (..., each[k]) for k, v in wanted.items()):
                return each
        return None

    def await_report(self, within_s: float = 120, **wanted: Any) -> dict[str, Any] | None:
        """None when it has ended without, or in time has not made it."""
        return self.await_that(lambda: self.find(**wanted), within_s)

    def await_that(self, holds: Callable[[], Any], within_s: float = 120) -> Any:
        deadline = time.monotonic() + within_s
        with self._news:
            while not (found := holds()) and not self._over:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(min(left, 0.5))
            return found or holds() or None

    def await_epochs(self, count: int, within_s: float = 120) -> bool:
        """Whether it has committed so many; it may also have ended before."""
        return bool(self.await_that(lambda: self.epochs >= count, within_s))

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    @property
    def was_killed(self) -> bool:
        return self.process.poll() == -signal.SIGKILL

    @property
    def epochs(self) -> int:
        """How many it has committed."""
        return sum("epoch" in each for each in list(self.reports))

    def slots(self) -> dict[int, int]:
        """{subtask: process id} of its slots."""
        run = self.find(run=...)
        return slot_pids(run["run"]) if run else {}

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()

    def wait(self, within_s: float = 120) -> dict[str, Any] | None:
        """Until it has ended; its last word, if it had one."""
        self.process.wait(within_s)
        self._reader.join(within_s)
        self._detach()
        return self.find(end=...)

    def go_on(self) -> None:
        """After it has stopped itself."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self, *, with_jvm: bool = True) -> None:
        """SIGKILL. A JVM that is left alone ends by itself, a little later."""
        with contextlib.suppress(ProcessLookupError):
            if with_jvm:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()
        self._detach()

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.close()

    def errors(self) -> str:
        """What Python said; Java's stack traces would bury it."""
        lines = self.log.read_text(errors="replace").splitlines(True)
        return "".join(line for line in lines if line[:4] != "\tat ")[-3000:]

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.lives:
            self.kill()
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
