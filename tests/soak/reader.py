"""A reader that polls the targets, all the time, and notes what it must never see.

Always true of what it may see:
- a batch is there with all its rows, or not at all;
- when a batch is there, so are all before it;
- what was there once stays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.soak.targets import Target

PAUSE_S = 0.05


def check_prefix(batches: Mapping[int, tuple[int, int]]) -> str | None:
    """What is wrong with what a reader sees."""
    for batch, (size, count) in sorted(batches.items()):
        if count != size:
            return f"{count} of the {size} rows of batch {batch}"
    if sorted(batches) != list(range(len(batches))):
        missing = next(at for at in range(len(batches)) if at not in batches)
        return f"batch {max(batches)} without batch {missing}"
    return None


@dataclass
class Watch:
    """What a reader of one target has seen."""

    name: str
    target: Target
    polls: int = 0
    """How often it could look."""
    refused: int = 0
    """How often the target was not there."""
    sizes: set[int] = field(default_factory=set)
    """How many batches it saw at once: each number is another moment."""
    problems: list[str] = field(default_factory=list)

    def look(self) -> None:
        try:
            batches = self.target.batches()
        except Exception:
            self.refused += 1
            return
        self.polls += 1
        problem = check_prefix(batches)
        if problem is None and self.sizes and len(batches) < max(self.sizes):
            problem = f"{len(batches)} batches after {max(self.sizes)}"
        if problem is not None and len(self.problems) < 5:
            self.problems.append(f"{self.name}: {problem}")
        self.sizes.add(len(batches))


class Readers:
    """Poll the targets that show whole epochs, each on a thread, until the block is left."""

    def __init__(self, into: Mapping[str, Target]) -> None:
        shown = {name: each for name, each in into.items() if each.shows_epochs}
        self.watches = [Watch(name, target) for name, target in shown.items()]
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._poll, args=(watch,), daemon=True)
            for watch in self.watches
        ]

    def _poll(self, watch: Watch) -> None:
        while not self._ending.is_set():
            started = time.monotonic()
            watch.look()
            # Never more than half of the time: the job is to be watched, not hindered.
            self._ending.wait(max(PAUSE_S, time.monotonic() - started))

    @property
    def problems(self) -> list[str]:
        return [problem for watch in self.watches for problem in watch.problems]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(30)
