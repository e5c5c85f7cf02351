"""The lives of a run: it waits for the lead, runs the job, and begins again after a failure.

    standby ──granted──> life ──ends──> over
       ^                  │ │
       └────lead lost─────┘ └──fails──> pause ──> the next life (with `ha`: standby)

Without `ha` and `restart` a run has one life.

Always true here:
- one life at a time; a life that has ended publishes nothing more: its log is closed;
- a lead that is lost ends its life before the next epoch;
- a failure that repetition cannot fix ends the run, with its cause.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from cairn.driver import progress
from cairn.driver.coordinator.epoch import clock_ms
from cairn.driver.coordinator.leadership import open_leadership
from cairn.driver.coordinator.leadership.base import Grant, Leadership, Member
from cairn.driver.engine import Engine
from cairn.driver.group import Group, choose_successor
from cairn.driver.life_notes import note_group, note_restart
from cairn.driver.options import Options
from cairn.driver.restarts import Restarts, parse_restart
from cairn.driver.spark_failure import error_without_spark
from cairn.driver.standby import Standby
from cairn.errors import CommitConflictError, EpochError
from cairn.ids import new_id
from cairn.logs import logger
from cairn.plan.graph import Graph
from cairn.report.status import Ending, Restart, Status
from cairn.storage.log import Log
from cairn.storage.notes import RESTARTS_KEPT
from cairn.storage.store import open_store

STANDBY_S = 2.0
"""A standby compares its program with the newest epoch at this interval."""
STANDBY_AGAIN_S = 5.0
"""The pause of a driver that has led and cannot be a standby now, if its policy has none."""
STOP_PATIENCE_S = 60.0


class Life(Protocol):
    """The job, led by this process: from a takeover to its end."""

    @property
    def engine(self) -> Engine: ...


L = TypeVar("L", bound=Life)


class StoppedInStandbyError(Exception):
    """The run was stopped before it led."""


class Lives(Generic[L]):
    """The lives of one run, on the thread of `begin` first and then on one of their own."""

    def __init__(
        self,
        graph: Graph,
        options: Options,
        *,
        begin_life: Callable[[Standby | None, Grant | None], L],
        url: str | None,
        on_end: Callable[[], None],
        is_interrupted: Callable[[], bool] = lambda: False,
        is_spark_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """`begin_life` takes the job over, with the standby's processes and on a grant.

        `url` is where the run is served. `on_end` is called once, after the last of several
        lives. If `is_spark_gone`, no other life can begin in this process.
        """
        self.life: L | None = None
        self.waits_as: Literal["standby", "restarting"] | None = None
        """The status between two lives; None during one."""
        self.error: BaseException | None = None
        """The error that ended the run."""
        self.has_committed = False
        """True once a life has committed an epoch: its `reset_sources` are done."""
        self.failovers = 0
        """The number of times that this process has continued the job of another one."""
        self.restart_history: deque[Restart] = deque(maxlen=RESTARTS_KEPT)
        """The last restarts of this process, oldest first."""
        self.ended = threading.Event()
        self._graph = graph
        self._options = options
        self._begin_life = begin_life
        self._on_end = on_end
        self._is_interrupted = is_interrupted
        self._is_spark_gone = is_spark_gone
        self._spark_gone = threading.Event()
        """Set when a standby has found that Spark is gone."""
        self._restarts = Restarts(parse_restart(options.restart))
        self._leadership: Leadership | None = None
        if options.ha is not None:
            self._leadership = open_leadership(options.ha, store=open_store(options.checkpoint))
            self.waits_as = "standby"
        self._member = Member(
            identity=new_id(),
            host=os.uname().nodename,
            pid=os.getpid(),
            url=url,
            standby=options.standby,
        )
        self._grant: Grant | None = None
        self._terms: set[int] = set()
        """The terms of the lives so far."""
        self._describing = threading.Lock()
        self._passed_on: tuple[L, str] | None = None
        """The life that ends because it was told to resign, and its successor."""
        self._stopping = threading.Event()
        self._is_raised = False

    @property
    def restarts(self) -> int:
        return self._restarts.count

    @property
    def is_repeated(self) -> bool:
        """True if another life may follow the first."""
        return self._leadership is not None or self._restarts.policy.kind != "none"

    @property
    def status(self) -> Status:
        if self.waits_as is not None and not self.ended.is_set():
            return self.waits_as
        return self._ended_between or self._engine.status

    @property
    def is_waiting(self) -> bool:
        """True while another member of the group may lead the job."""
        if self._leadership is None or self.ended.is_set():
            return False
        return self.life is None or self.waits_as is not None

    @property
    def ended_as(self) -> Ending | None:
        """The end of the run; None until it has ended."""
        if self.is_repeated and not self.ended.is_set():
            return None
        return self._ended_between or self._engine.ended_as

    @property
    def _ended_between(self) -> Ending | None:
        """The end of a run that was between two lives."""
        if self.waits_as is None or not self.ended.is_set():
            return None
        return "stopped" if self.error is None else "failed"

    @property
    def _engine(self) -> Engine:
        assert self.life is not None, "a life has begun"
        return self.life.engine

    def leader(self) -> Member | None:
        """Return the member that leads the job, this one if it does; None if nobody is known."""
        grant = self._grant
        if grant is not None and not grant.lost.is_set():
            return self._member
        if self._leadership is None or self.ended.is_set():
            return None
        return self._leadership.leader()

    def group(self) -> Group | None:
        """Return who leads and who waits, as far as is known; None without `ha`, and at the end."""
        if self._leadership is None or self.ended.is_set():
            return None
        return Group(
            url=self._leadership.url,
            leader=self.leader(),
            standbys=self._leadership.waiting(),
            this=self._member,
        )

    # From the user's threads

    def begin(self) -> None:
        """Wait for the lead, and start the first life. Raises why it does not start."""
        try:
            self._next_life()
        except StoppedInStandbyError:
            self._finish()
            return
        except BaseException:
            self._close_group()
            raise
        if self.is_repeated:
            threading.Thread(
                target=self._follow, daemon=True, name=f"cairn-{self._graph.name}-lives"
            ).start()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end of the last life and raise its error. False after `timeout` seconds."""
        if not self.is_repeated:
            assert self.life is not None, "begun"
            return self.life.engine.wait(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._wait_briefly():
            if deadline is not None and time.monotonic() > deadline:
                return False
        self.raise_error()
        return True

    def _wait_briefly(self) -> bool:
        """Wait for a moment, so that Ctrl-C is heard; True if the run has ended."""
        if self.ended.is_set():
            return True
        assert self.life is not None, "a run without a life has ended"
        # The life of the moment need not log its error: this call raises it.
        with self.life.engine.count_waiting():
            return self.ended.wait(0.2)

    def raise_error(self, *, again: bool = True) -> None:
        """Raise the error of the run, if any; unless `again`, only if it was not raised before."""
        if not self.is_repeated:
            if self.life is not None:
                self.life.engine.raise_error(again=again)
        elif self.error is not None and (again or not self._is_raised):
            self._is_raised = True
            raise self.error.with_traceback(None) from self.error.__cause__

    def stop(self) -> None:
        """End the run after the epoch under way, or at once in standby, and wait for it."""
        self._stopping.set()
        if self.life is not None and self.life.engine.ended_as is None:
            self.life.engine.stop()
        if self.is_repeated:
            self.ended.wait(STOP_PATIENCE_S)

    def resign(self, to: str | None = None) -> Member:
        """Finish the epoch, pass the lead on, and wait as a standby; return the successor.

        `to` is the identity or the host of the standby to take it; None for any.
        """
        life = self.life
        if self._leadership is None:
            raise EpochError(
                f"the run of job {self._graph.name!r} is not one of a group\n"
                "  next: start it with ha=, on two machines"
            )
        # A life that begins cannot be ended yet; `life` is the one before it.
        if self._grant is None or life is None or self.waits_as is not None:
            raise EpochError(
                f"this driver does not lead job {self._graph.name!r}\n"
                "  next: ask the driver that does; cairn leader names it"
            )
        chosen = choose_successor(self._leadership.waiting(), to, self._graph.name)
        self._passed_on = life, chosen.identity
        life.engine.stop()
        return chosen

    # Between lives

    def _follow(self) -> None:
        """Wait for the end of each life, and begin the next."""
        try:
            while True:
                assert self.life is not None, "begun"
                self.life.engine.ended.wait()
                if not self._goes_on(self.life.engine.turn.error):
                    return
                self._next_life()
        except StoppedInStandbyError:
            return
        except BaseException as error:
            self.error = error
            logger.error("the run failed: %s", error, extra={"job": self._graph.name})
        finally:
            self._finish()

    def _goes_on(self, error: BaseException | None) -> bool:
        """Decide after a life: True if another one follows, after its pause."""
        passed_on, self._passed_on = self._passed_on, None
        # A life may have ended by itself before it was told to: that was another one.
        if passed_on is not None and passed_on[0] is self.life:
            self._resign(passed_on[1])
            return not self._stopping.is_set()
        is_fenced = isinstance(error, CommitConflictError)
        self._resign()
        if self._stopping.is_set() or error is None:
            self.error = None if is_fenced else error
            return False
        if self._leadership is not None and is_fenced:
            progress.say("the lead is lost: waiting as a standby")
            return True
        self._check_spark(error)
        if not self._pause_after(error):
            self.error = error
            return False
        return True

    def _check_spark(self, cause: BaseException) -> None:
        """Raise an error if Spark is gone: then no life can follow, whatever the policy."""
        if self.is_repeated and self._is_spark_gone():
            raise error_without_spark(self._graph.name) from cause

    def _pause_after(self, error: BaseException) -> bool:
        """Wait as the policy says; False if no life shall follow."""
        pause_s = self._restarts.after(error)
        if pause_s is None:
            return False
        cause = _first_line(error)
        self._note_restart(error, cause, pause_s)
        self.waits_as = "restarting"
        logger.warning(
            "restart %d in %g s, after: %s", self._restarts.count, pause_s, cause,
            extra={"job": self._graph.name},
        )  # fmt: skip
        progress.say(f"restarting in {pause_s:g} s, after: {cause}")
        self._sleep(pause_s)
        return True

    def _sleep(self, pause_s: float) -> None:
        deadline_s = time.monotonic() + pause_s
        while time.monotonic() < deadline_s and not self._is_stopping():
            time.sleep(0.1)

    def _note_restart(self, error: BaseException, cause: str, pause_s: float) -> None:
        restart = Restart(
            number=self._restarts.count,
            wall_ms=clock_ms(),
            pause_ms=round(pause_s * 1000),
            kind=type(error).__name__,
            cause=cause or type(error).__name__,
            host=self._member.host,
            pid=self._member.pid,
        )
        self.restart_history.append(restart)
        note_restart(self._options.checkpoint, restart)

    def _next_life(self) -> None:
        """Wait for the lead and start; a start that may succeed later is repeated."""
        while True:
            standby: Standby | None = None
            grant: Grant | None = None
            try:
                self._check_stopping()  # Also between two tries that fail.
                # A wait in standby counts as quiet, and the life before it does not.
                self._restarts.begin()
                if self._leadership is not None:
                    standby = self._stand_by()
                    grant = self._grant
                    self._restarts.begin()
                self._check_stopping()
                self._note_committed()
                life = self._begin_life(standby, grant)
                term = life.engine.coordinator.term
                if grant is not None and self._leadership is not None:
                    _watch(grant, life.engine)
                    self._count_failover(life.engine)
                url = None if self._leadership is None else self._leadership.url
                note_group(self._options.checkpoint, term, url)
                self._terms.add(term)
                self.life, self.waits_as = life, None
                if self._stopping.is_set():
                    # `stop` came while the life began, and has not seen it.
                    life.engine.stop()
                return
            except Exception as error:
                self._resign()  # First: the others need not wait until slots have ended.
                if standby is not None:
                    standby.close()
                if isinstance(error, StoppedInStandbyError):
                    raise
                self._check_spark(error)
                is_beaten = grant is not None and isinstance(error, CommitConflictError)
                if is_beaten or self._pause_after(error):
                    continue
                # It has led, so its program and options are right: the store or Spark is not.
                is_standby = self._leadership is not None and grant is None
                if not is_standby or self.life is None or self._restarts.is_over:
                    raise
                logger.warning("this driver cannot be a standby now: %s", _first_line(error))
                self._sleep(STANDBY_AGAIN_S)

    def _count_failover(self, engine: Engine) -> None:
        newest = engine.coordinator.newest
        self.failovers += newest is not None and newest.term not in self._terms

    def _note_committed(self) -> None:
        """Look in the log, which also has an epoch whose commit was not acknowledged."""
        if self._options.reset_sources and self._terms and not self.has_committed:
            newest = Log(open_store(self._options.checkpoint)).newest_epoch()
            self.has_committed = newest is not None and newest.term in self._terms

    def _stand_by(self) -> Standby:
        """Wait until this member leads; the program is ready to start then."""
        assert self._leadership is not None, "only a group has standbys"
        self.waits_as = "standby"
        standby = Standby(self._graph, self._options)
        granted = threading.Event()
        try:
            standby.begin(granted)
            member = self._describe(standby)
            threading.Thread(
                target=self._keep_described,
                args=(standby, granted),
                daemon=True,
                name="cairn-standby",
            ).start()
            stop = _Either(
                self._stopping, lambda: self._is_interrupted() or self._spark_gone.is_set()
            )
            other = self._leadership.leader()
            if other is not None and other.identity != member.identity:
                here = "" if member.url is None else f"; this driver serves at {member.url}"
                progress.say(f"standby: {other.host} leads the job{here}")
            self._grant = self._leadership.campaign(member, stop)
            if self._grant is None:
                if self._spark_gone.is_set() and not self._is_stopping():
                    raise error_without_spark(self._graph.name)
                self._stopping.set()
                raise StoppedInStandbyError
            granted.set()
            logger.info("this driver is granted the lead", extra={"job": self._graph.name})
            # Before the takeover: the first record of the leader has it.
            with self._describing:
                self._member = msgspec.structs.replace(
                    self._member, since_ms=clock_ms(), refusal=None, epoch=None
                )
                self._leadership.update(self._member)
        except BaseException:
            granted.set()
            standby.close()
            raise
        return standby

    def _describe(self, standby: Standby) -> Member:
        self._member = msgspec.structs.replace(
            self._member, since_ms=clock_ms(), refusal=standby.refusal(), epoch=standby.epoch
        )
        return self._member

    def _keep_described(self, standby: Standby, granted: threading.Event) -> None:
        """Show the others if this program could continue the job, and from which epoch."""
        assert self._leadership is not None, "only a group has standbys"
        while not granted.wait(STANDBY_S):
            if self._is_spark_gone():
                # A lead that is granted to this driver would be lost time for the others.
                self._spark_gone.set()
                return
            refusal, epoch = standby.refusal(), standby.epoch
            with self._describing:
                member = msgspec.structs.replace(self._member, refusal=refusal, epoch=epoch)
                # A leader has described itself by now.
                if member != self._member and not granted.is_set():
                    self._member = member
                    self._leadership.update(member)

    def _resign(self, to: str | None = None) -> None:
        grant, self._grant = self._grant, None
        if grant is not None:
            grant.resign(to)

    def _is_stopping(self) -> bool:
        return self._stopping.is_set() or self._is_interrupted()

    def _check_stopping(self) -> None:
        if self._is_stopping():
            self._stopping.set()
            raise StoppedInStandbyError

    def _close_group(self) -> None:
        self._resign()
        if self._leadership is not None:
            self._leadership.close()

    def _finish(self) -> None:
        try:
            self._close_group()
        finally:
            self.ended.set()
            self._on_end()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _watch(grant: Grant, engine: Engine) -> None:
    """End a life when its lead is lost."""

    def wait() -> None:
        while not engine.ended.is_set():
            # A life that has ended has given its grant up.
            if grant.lost.wait(0.5) and not engine.ended.is_set():
                engine.abandon()
                return

    threading.Thread(target=wait, daemon=True, name="cairn-lead").start()


class _Either(threading.Event):
    """An event that is also set when a condition holds."""

    def __init__(self, event: threading.Event, holds: Callable[[], bool]) -> None:
        super().__init__()
        self._event = event
        self._holds = holds

    def is_set(self) -> bool:
        return self._event.is_set() or self._holds()

    def wait(self, timeout: float | None = None) -> bool:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left_s = 0.2 if deadline_s is None else min(0.2, deadline_s - time.monotonic())
            if left_s <= 0:
                return False
            self._event.wait(left_s)
        return True
