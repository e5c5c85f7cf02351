"""Slots that stand still at each crash point, once, while something is done to the world."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cairn import crash
from cairn.slot import compactor
from cairn.testing import crash_points
from tests.spark.programs.ledger import Ledger

SLOT_POINTS = sorted(set(crash_points("slot")) - {"slot.sst.uploaded"})
"""The crash points that a slot without RocksDB reaches."""


class Stands:
    """The points at which slots stand and have stood, as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def arm(self) -> None:
        """Let slots stand from now on."""
        (self.folder / "armed").touch()

    def stand(self, point: str) -> None:
        """Stand still at a point if no slot has done so before."""
        if point not in SLOT_POINTS or not (self.folder / "armed").exists():
            return
        try:
            (self.folder / point).touch(exist_ok=False)
        except FileExistsError:
            return
        while not self._passed(point).exists():
            time.sleep(0.01)

    def left(self) -> list[str]:
        """Return the points that no slot has passed yet."""
        return [point for point in SLOT_POINTS if not self._passed(point).exists()]

    @contextlib.contextmanager
    def served_by(self, act: Callable[[], None]) -> Iterator[None]:
        """Within the block, do this whenever a slot stands, then let it go on."""
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.wait(0.02):
                for point in self.left():
                    if (self.folder / point).exists():
                        act()
                        self._passed(point).touch()

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield
        finally:
            is_over.set()
            server.join()

    def _passed(self, point: str) -> Path:
        return self.folder / f"{point}.passed"


class Impatient(Ledger):
    """Its slots do not wait half a minute after a base that could not be written."""

    def open(self, ctx: Any) -> None:
        compactor.RETRY_AFTER_S = 0


class Standing(Impatient):
    """Its slots stand at each point."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def open(self, ctx: Any) -> None:
        super().open(ctx)
        crash._told = Stands(Path(self.folder)).stand
