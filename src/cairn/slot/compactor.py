"""Bases and merged deltas, written by the slot while epochs run.

One piece of work at a time, on a thread of its own. It shares Python's interpreter lock with
the functions, and the machine with Spark, which plans the next epoch while the slot is idle.
So it works in small pieces and rests between them, longer while rows are processed. It takes no
rest while the changes that it writes are more than the memory for them.

Always true here:
- an epoch does not wait for what is written here, and does not fail because of it, unless the
  slot calls `wait`, because memory is full of what is to be written;
- what is announced is durable; it is announced until the coordinator has settled it;
- an operator has at most one piece of work under way.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from cairn.backends.contract import BaseCancelledError
from cairn.errors import CairnError
from cairn.protocol.messages import Compacted

REST_BUSY = 9.0
REST_IDLE = 2.0
"""Sleep this multiple of the time worked."""
REST_MAX_S = 0.25
RETRY_AFTER_S = 30.0

Pace = Callable[[], None]


class Work(NamedTuple):
    uid: str
    run: Callable[[Pace], Compacted | None]
    close: Callable[[], None]
    is_urgent: Callable[[], bool] = lambda: False
    """True while memory waits for it."""


class Failure(NamedTuple):
    """The reason why a piece of work failed."""

    why: str
    """The message of the error, in one line."""
    place: str
    """The address of the database; empty if the error does not name one."""


class Compactor:
    """The background work of one slot.

    With `threaded=False` nothing runs by itself: `work()` does what is waiting, so that a
    simulation decides when.
    """

    def __init__(self, is_busy: Callable[[], bool] = lambda: False, *, threaded: bool = True):
        self._is_busy = is_busy
        self._threaded = threaded
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._running: Work | None = None
        self._cancelled: set[str] = set()
        self._done: list[Compacted] = []
        self._failed = ""
        self._not_before_s: dict[str, float] = {}
        self._failures: dict[str, Failure] = {}
        """By operator: why its last piece of work failed."""
        self._waiters = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._resumed_s = 0.0

    def is_free(self, uid: str, *, rests: bool = True) -> bool:
        """True if `submit` would accept work of this operator now.

        `rests`: not for some time after a failure.
        """
        with self._changed:
            return (
                not self._closed
                and uid not in {work.uid for work in self._all()}
                and uid not in {file.uid for file in self._done}
                and (not rests or time.monotonic() >= self._not_before_s.get(uid, 0.0))
            )

    def submit(self, work: Work) -> None:
        with self._changed:
            assert work.uid not in {other.uid for other in self._all()}, "one at a time"
            self._waiting.append(work)
            self._cancelled.discard(work.uid)
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._loop, daemon=True, name="compactor")
                self._thread.start()
            self._changed.notify_all()

    def list_unconfirmed(self) -> tuple[Compacted, ...]:
        """Return the files that are written and not confirmed by the driver yet."""
        with self._changed:
            return tuple(self._done)

    def settle(self, ids: Collection[str]) -> None:
        """Forget files that the coordinator has confirmed."""
        with self._changed:
            self._done = [file for file in self._done if file.stored.id not in ids]

    def failure(self) -> str:
        """Why the last piece of work failed; told once."""
        with self._changed:
            failed, self._failed = self._failed, ""
            return failed

    def last_failure(self, uid: str) -> Failure | None:
        """Why the last piece of work of an operator failed; None if it did not."""
        with self._changed:
            return self._failures.get(uid)

    def wait(self, uid: str, check: Callable[[], None]) -> bool:
        """Wait for the work of an operator, which takes no rest meanwhile.

        Return False if none is under way. Calls `check` now and then; it may raise to give up.
        """
        with self._changed:
            if not self._is_under_way(uid):
                return False
        if not self._threaded:
            self.work()
            return True
        with self._changed:
            self._waiters += 1
            try:
                while self._is_under_way(uid):
                    check()
                    self._changed.wait(0.05)
            finally:
                self._waiters -= 1
        return True

    def _is_under_way(self, uid: str) -> bool:
        return any(work.uid == uid for work in self._all())

    def cancel(self, uid: str) -> None:
        """The operator's state is another one from now on: forget what was made of it.

        Returns when nothing reads that state any more.
        """
        with self._changed:
            self._done = [file for file in self._done if file.uid != uid]
            self._failures.pop(uid, None)
            self._cancelled.add(uid)
            for work in [work for work in self._waiting if work.uid == uid]:
                self._waiting.remove(work)
                work.close()
            while self._running is not None and self._running.uid == uid:
                self._changed.wait(0.05)

    def work(self) -> None:
        """Do all that is waiting, here and now."""
        while self._step():
            pass

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._cancelled |= {work.uid for work in self._all()}
            while self._waiting:
                self._waiting.popleft().close()
            self._changed.notify_all()
            while self._running is not None:
                self._changed.wait(0.05)

    def _all(self) -> list[Work]:
        return [*self._waiting, *([] if self._running is None else [self._running])]

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            self._step()

    def _step(self) -> bool:
        with self._changed:
            if not self._waiting:
                return False
            work = self._running = self._waiting.popleft()
        self._resumed_s = time.monotonic()
        done: Compacted | None = None
        failed: Failure | None = None
        text = ""
        try:
            done = work.run(self._pace)
        except BaseCancelledError:
            pass
        except Exception as error:
            # The files that are there stay as they are; it will be due again.
            traceback.print_exc()
            failed = _failure_of(error)
            text = f"{work.uid}: {type(error).__name__}: {error}"
        finally:
            work.close()
        with self._changed:
            self._running = None
            if work.uid not in self._cancelled:
                if done is not None:
                    self._done.append(done)
                self._failures.pop(work.uid, None)
                if failed is not None:
                    self._failures[work.uid], self._failed = failed, text
                    self._not_before_s[work.uid] = time.monotonic() + RETRY_AFTER_S
            self._changed.notify_all()
        return True

    def _pace(self) -> None:
        """Called between small pieces of work."""
        work = self._running
        if work is not None and work.uid in self._cancelled:
            raise BaseCancelledError
        is_awaited = self._waiters > 0 or (work is not None and work.is_urgent())
        if self._threaded and not is_awaited:
            rest = REST_BUSY if self._is_busy() else REST_IDLE
            time.sleep(min(REST_MAX_S, rest * (time.monotonic() - self._resumed_s)))
        self._resumed_s = time.monotonic()


def _failure_of(error: Exception) -> Failure:
    lines = [line.strip() for line in str(error).splitlines()]
    why = "; ".join(line for line in lines if line and not line.startswith("next:"))
    facts = error.facts if isinstance(error, CairnError) else {}
    return Failure(why or type(error).__name__, str(facts.get("database") or ""))
