"""A process that slots live beside, in a runtime folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from cairn.process_identity import identify
from cairn.slot.process import SlotHome


def eventually(holds: Callable[[], object], within_s: float = 30) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_gone(dead: psutil.Process) -> bool:
    try:
        return not dead.is_running() or dead.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # It has gone in between.
        return True


class Executor:
    """A process that slots live beside."""

    def __init__(self) -> None:
        self.process = psutil.Popen(["sleep", "600"])
        self.identity = identify(self.process.pid)

    def home(self, number: int) -> SlotHome:
        return SlotHome("nursery-test-run", self.identity, number)

    def slot(self, number: int) -> psutil.Process:
        """The process of a slot that was started."""
        return psutil.Process(self.home(number).start().process.pid)

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait()

    def log(self, number: int) -> str:
        return self.home(number).log.read_text()


@contextlib.contextmanager
def runtime_folder() -> Iterator[None]:
    """Slots that are started inside have a runtime folder of their own."""
    # Sockets lie below it, and their paths are short.
    folder = f"/tmp/cn{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAIRN_RUNTIME_DIR", folder)
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with runtime_folder():
        one = Executor()
        yield one
        one.end()
