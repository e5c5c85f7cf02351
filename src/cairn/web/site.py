"""A site serves one checkpoint, and the run that writes it if that is in this process.

Always true here:
- a site does not change the job through its store: it reads, and for a long read it writes a
  hold beside the epochs, so that the job keeps the epoch meanwhile;
- each thread has its own Log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.leadership.in_store import StoreLeadership
from cairn.driver.coordinator.leadership.opening import open_leadership
from cairn.driver.group import Group
from cairn.driver.serving import Serve
from cairn.errors import PlanError
from cairn.query.health import checkpoint_health, read_declared, run_health
from cairn.report.balance import Balance
from cairn.report.epoch import EpochReport
from cairn.report.scaling import ScalingReport
from cairn.report.status import Health, Restart, Status
from cairn.storage.log import Log
from cairn.storage.notes import read_group
from cairn.storage.store import Store, open_store
from cairn.web.errors import ApiError
from cairn.web.sessions import Sessions

if TYPE_CHECKING:
    from cairn.driver.roster import SlotInfo
    from cairn.query.live import Answer, Answers
    from cairn.snapshots.savepoint import SavepointInfo
    from cairn.snapshots.tables import StateSource

HEALTH_S = 1.0
"""Health and group are read at most once in this time, for all requests."""
RATED_EPOCHS_MAX = 200
HEAVY_READS_MAX = 4
"""At once: each may hold a chunk of state in memory."""


class StatusFacts(msgspec.Struct, frozen=True):
    """The status of the job, in words."""

    status: Status
    paused: str | None
    error: str | None
    live: bool
    """The run is in this process."""


def _text(error: BaseException | None) -> str | None:
    return None if error is None else str(error)


class LiveRun(Protocol):
    """A run, as far as a site uses it."""

    name: str

    @property
    def error(self) -> BaseException | None: ...
    @property
    def status(self) -> Status: ...
    @property
    def paused(self) -> str | None: ...
    @property
    def parallelism(self) -> int: ...
    @property
    def scaling(self) -> ScalingReport: ...
    @property
    def restarts(self) -> int: ...
    @property
    def failovers(self) -> int: ...
    @property
    def is_waiting(self) -> bool: ...
    def group(self) -> Group | None: ...
    def resign(self, to: str | None = None) -> Member: ...
    def restart_history(self) -> list[Restart]: ...
    def slots(self) -> Sequence[SlotInfo]: ...
    def metrics(self) -> EpochReport | None: ...
    def history(self) -> list[EpochReport]: ...
    def query(self, operator: str, state: str, key: Any) -> Answer: ...
    def query_many(self, operator: str, state: str, keys: Any) -> Answers: ...
    def savepoint(self, path: str) -> SavepointInfo: ...
    def rescale(self, parallelism: int) -> None: ...
    def rebalance(self) -> Balance: ...
    def check_stop(self, savepoint: str | None = None) -> None: ...
    def stop(self, savepoint: str | None = None) -> None: ...


class Site:
    """One per server."""

    def __init__(
        self,
        checkpoint: str,
        settings: Serve | None = None,
        *,
        run: LiveRun | None = None,
        store: Store | None = None,
    ) -> None:
        self.store = open_store(checkpoint, create=False) if store is None else store
        self.checkpoint = self.store.url
        self.settings = settings or Serve()
        self.run = run
        self.sessions = Sessions()
        self.closing = threading.Event()
        """Set when the server is about to end: long reads must end by themselves."""
        self.flight_port: int | None = None
        """The port of Arrow Flight, once whole states are served."""
        self._on_closing: list[Callable[[], None]] = []
        self._logs = threading.local()
        self._heavy = threading.BoundedSemaphore(HEAVY_READS_MAX)
        self._trigger_ms: int | None = None
        self._opened_ms = time.time_ns() // 1_000_000
        self._health: tuple[Health | None, float] = (None, 0.0)
        self._health_lock = threading.Lock()
        self._watched: StoreLeadership | None = None
        """The group of a checkpoint whose run is elsewhere: it remembers what it has seen."""
        self._group: tuple[Group | None, float] = (None, float("-inf"))
        self._group_lock = threading.Lock()

    def on_closing(self, call: Callable[[], None]) -> None:
        """Register a call for the end of the server."""
        self._on_closing.append(call)

    def close(self) -> None:
        self.closing.set()
        for call in self._on_closing:
            call()

    @property
    def log(self) -> Log:
        """The records of the checkpoint, for this thread."""
        log: Log | None = getattr(self._logs, "log", None)
        if log is None:
            log = self._logs.log = Log(self.store)
        return log

    @property
    def has_control(self) -> bool:
        """True if a client may change the job."""
        return self.settings.control_token is not None and self.run is not None

    def open_state(self, epoch: int | None = None, *, hold: bool = False) -> StateSource:
        """Open the state as of an epoch, the newest by default. Close it.

        Without a `hold` nothing is written, and a read is a StaleEpochError when the job
        retires the epoch meanwhile. What may last takes one.
        """
        from cairn.snapshots.holds import READ_MS
        from cairn.snapshots.tables import open_state

        return open_state(self.store, epoch, hold_ms=READ_MS if hold else 0)

    def health(self) -> Health:
        """Return the health of the job now, as far as it can be seen from here.

        Without a run it is read from the store, at most once in HEALTH_S for all requests.
        """
        with self._health_lock:
            known, read_s = self._health
            if known is not None and time.monotonic() - read_s < HEALTH_S:
                return known
            found = self._look()
            self._health = (None if self.run is not None else found), time.monotonic()
            return found

    def _look(self) -> Health:
        run = self.run
        if run is None:
            return checkpoint_health(self.log)
        now_ms = time.time_ns() // 1_000_000
        known = run.history()[: -RATED_EPOCHS_MAX - 1 : -1]
        return run_health(
            self.log,
            run.status,
            known,
            why=run.paused if run.error is None else str(run.error),
            now_ms=now_ms,
            started_ms=self._opened_ms,
            trigger_ms=self._read_trigger_ms(),
            restart=next(reversed(run.restart_history()), None),
        )

    def _read_trigger_ms(self) -> int:
        """Return the interval that the run was started with; it does not change."""
        if self._trigger_ms is None:
            _, self._trigger_ms = read_declared(self.log)
        return self._trigger_ms

    def status(self) -> StatusFacts:
        """Return the part of a job's health that events report: it changes rarely."""
        run = self.run
        if run is not None:
            return StatusFacts(run.status, run.paused, _text(run.error), live=True)
        health = self.health()
        return StatusFacts(health.status, None, health.why, live=False)

    def group(self) -> Group | None:
        """Return the drivers of the job; None if they are not a group that is seen from here.

        Without a run, only a group in the checkpoint itself (`store:`) is looked at.
        """
        with self._group_lock:
            known, read_s = self._group
            if time.monotonic() - read_s >= HEALTH_S:
                known = self._look_at_group()
                self._group = known, time.monotonic()
            return known

    def _look_at_group(self) -> Group | None:
        if self.run is not None:
            return self.run.group()
        url = self.group_url()
        if url is None or not url.startswith("store:"):
            return None
        if self._watched is None or self._watched.url != url:
            try:
                watched = open_leadership(url, store=self.store)
            except PlanError:
                return None  # Noted by another version of cairn.
            assert isinstance(watched, StoreLeadership), "the scheme is store:"
            self._watched = watched
        return Group(url=url, leader=self._watched.leader(), standbys=self._watched.waiting())

    def group_url(self) -> str | None:
        """Return the address of the group that the leader has noted; None without one."""
        return read_group(self.store)

    @contextmanager
    def heavy(self) -> Iterator[None]:
        """Bound the number of expensive reads at once; beyond it, raise 429."""
        if not self._heavy.acquire(blocking=False):
            raise ApiError(
                429,
                "busy",
                f"{HEAVY_READS_MAX} large reads are under way",
                "try again in a moment",
            )
        try:
            yield
        finally:
            self._heavy.release()
