"""Drivers of one checkpoint that run one at a time, from one request to the store to the next.

Always true here:
- a seed decides which driver runs next, how long each request takes and who is paused or killed;
- a driver may be paused before and after every request, for longer than a lease;
- every driver has a clock of its own rate, which runs on while the driver is paused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from greenlet import getcurrent, greenlet

from cairn.storage.store import NotFoundError, Store, StoredObject
from cairn.testing.faulty_store import FaultyStore

T = TypeVar("T")

RATE_MAX = 1.25
"""Clocks run at most this much faster or slower than the true one."""


class DictStore(Store):
    """Objects in a dict: the same promises as a bucket, in microseconds."""

    url = "dict:"

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def get(self, path: str) -> bytes:
        if path not in self._objects:
            raise NotFoundError(path)
        return self._objects[path]

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        return self.get(path)[offset : offset + length]

    def put(self, path: str, data: bytes) -> None:
        self._objects[path] = data

    def put_file(self, path: str, local_file: str) -> None:
        self.put(path, Path(local_file).read_bytes())

    def put_if_absent(self, path: str, data: bytes) -> bool:
        is_absent = path not in self._objects
        self._objects.setdefault(path, data)
        return is_absent

    def move(self, src: str, dst: str) -> None:
        self._objects[dst] = self._objects.pop(src)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._objects.pop(path, None)

    def list(self, prefix: str = "") -> list[StoredObject]:
        found = sorted(path for path in self._objects if path.startswith(f"{prefix}/"))
        return [StoredObject(path, len(self._objects[path]), 0) for path in found]

    def exists(self, path: str) -> bool:
        return path in self._objects

    def local_path(self, path: str) -> str | None:
        return None


class KilledError(BaseException):
    """The driver's process is gone."""


class Worker:
    """One driver's stack, its clock, and the store as it reaches it."""

    def __init__(self, schedule: Schedule, name: str, live: Callable[[Worker], None]) -> None:
        chance = schedule.chance
        self.schedule, self.name = schedule, name
        self.rate = chance.uniform(1 / RATE_MAX, RATE_MAX)
        self.offset_s = chance.uniform(0, 10**6)
        self.wake_ms = schedule.now_ms
        self.is_killed = False
        self.failure: BaseException | None = None
        self.store = _StepStore(self, chance.choice([0, 0, 0.02, 0.1]))
        self._chance = random.Random(chance.random())
        self._live = live
        # Not a thread: a schedule has thousands of turns, and each must cost microseconds.
        self._stack = greenlet(self._run, parent=getcurrent())

    def clock_s(self) -> float:
        return self.offset_s + self.rate * self.schedule.now_ms / 1000

    def sleep(self, seconds: float) -> None:
        """Let others run for so many seconds of the own clock."""
        self.wake_ms = self.schedule.now_ms + round(seconds / self.rate * 1000)
        self.step()

    def step(self) -> None:
        """Let the schedule decide who runs next."""
        assert self._stack.parent is not None
        self._stack.parent.switch()
        if self.is_killed:
            raise KilledError

    def maybe_step(self) -> None:
        if self._chance.random() < 0.3:
            self.step()

    def resume(self) -> None:
        """Run the driver up to its next request; called by the schedule."""
        self._stack.switch()

    def kill(self) -> None:
        self.is_killed = True
        self.resume()

    def _run(self) -> None:
        try:
            if not self.is_killed:
                self._live(self)
        except KilledError:
            pass
        except BaseException as error:
            self.failure = error


class _StepStore(FaultyStore):
    """Other drivers may run before and after each request."""

    def __init__(self, worker: Worker, fault_rate: float) -> None:
        seed = worker.schedule.chance.randrange(10**9)
        super().__init__(worker.schedule.store, seed=seed, fault_rate=fault_rate)
        self._worker = worker
        self.enabled = worker.schedule.has_faults

    def _run(self, operation: str, call: Callable[[], T]) -> T:
        self._worker.step()
        try:
            return super()._run(operation, call)
        finally:
            # A request that is done, and whose driver is paused before it sees the answer.
            self._worker.maybe_step()


class Schedule:
    """Two to four drivers. `live` is the life of one, from its start until it is killed."""

    def __init__(self, seed: int, live: Callable[[Worker], None]) -> None:
        self.chance = random.Random(seed)
        self.store = DictStore()
        self.now_ms = 0
        self.has_faults = True
        self._live = live
        self.workers = [
            Worker(self, f"d{number}", live) for number in range(self.chance.randint(2, 4))
        ]

    def run(self, seconds: float) -> None:
        until_ms = self.now_ms + round(seconds * 1000)
        while self.now_ms < until_ms:
            ready = [worker for worker in self.workers if worker.wake_ms <= self.now_ms]
            if not ready:
                self.now_ms = min(worker.wake_ms for worker in self.workers)
                continue
            worker = self.chance.choice(ready)
            luck = self.chance.random() if self.has_faults else 1.0
            if luck < 0.01:
                worker.wake_ms = self.now_ms + self.chance.randint(1, 30_000)
            elif luck < 0.014:
                worker.kill()
                self.workers[self.workers.index(worker)] = Worker(self, worker.name, self._live)
            else:
                worker.resume()
                self._raise_failure(worker)
                self.now_ms += self.chance.randint(1, 400 // len(self.workers))

    def end_faults(self) -> None:
        self.has_faults = False
        for worker in self.workers:
            worker.store.enabled = False
            worker.wake_ms = min(worker.wake_ms, self.now_ms)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _raise_failure(self, worker: Worker) -> None:
        if worker.failure is not None:
            raise worker.failure
