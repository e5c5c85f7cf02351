"""The coordinator: take over, run batches, commit epochs.

    take_over -> recover -> run_batch*          each epoch:
      begin     fix the state that the attempt starts from
      execute   the subtasks run and acknowledge (in Spark, or in a simulation); in a job with
                loops in several rounds, while records are sent back
      pack      write small deltas into one object
      manifest  put-if-absent: from here on the epoch exists
      commit    the sinks publish, and are called again until they succeed
      collect   delete files that no kept epoch needs

An epoch may have several batches (`checkpoint_every`): each is executed and packed, the last
one is followed by manifest and commit. Until then the epoch is `newest`, and in this driver
only. With a weaker guarantee each batch is published when it is packed.

It does not import Spark: `execute` is passed in.

Always true here:
- nothing is aborted, collected or cut before the takeover is in the log;
- with exactly-once, sinks publish an epoch only after its manifest is written;
- `now` and the watermark never go back, and are the same in every attempt at a batch;
- parallelism and functions change between two epochs, never within one;
- an epoch that failed before its manifest never happened; a batch is tried again whole, with
  all its rounds, on the state that the batch before has left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from cairn.backends.registry import kind_of
from cairn.crash import crash_point
from cairn.driver.coordinator import events
from cairn.driver.coordinator.attempts import Attempts
from cairn.driver.coordinator.division import Division
from cairn.driver.coordinator.guarantees import Guarantee
from cairn.driver.coordinator.job_clock import JobClock
from cairn.driver.coordinator.marks import check_marks
from cairn.driver.coordinator.measured import collect_announced
from cairn.driver.coordinator.output import targets_of
from cairn.driver.coordinator.publisher import Paused, Publisher
from cairn.driver.coordinator.quiet_collector import pause_collector
from cairn.driver.coordinator.ran import Ran
from cairn.driver.coordinator.record import apply_compactions, committables_of, pack_small_files
from cairn.driver.coordinator.rounds import Execute, latest_times, run_rounds
from cairn.driver.coordinator.slices import Slices
from cairn.driver.coordinator.subtasks import Subtasks
from cairn.driver.coordinator.ticker import timers_of
from cairn.driver.coordinator.versions import Versions
from cairn.driver.coordinator.watermarks import clocks_of
from cairn.errors import CairnError, CommitConflictError, CommitError, EpochError
from cairn.ids import new_id
from cairn.logs import logger, scope
from cairn.plan.graph import Watermark
from cairn.process_identity import identify, pid_namespace
from cairn.protocol.messages import Begin, Slice
from cairn.protocol.parts import move_parts
from cairn.protocol.scoped_state import states_by_scope
from cairn.protocol.spec import JobSpec, OperatorSpec
from cairn.report.scaling import Decision
from cairn.sinks.base import Execution, Sink
from cairn.slot.feedback import feedback_state
from cairn.storage.conditional_put import check_conditional_put
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.pending import Pending
from cairn.storage.retention import Collector
from cairn.storage.store import Store
from cairn.types.durations import MAX_MS

INLINE_BYTES_MAX = 64 * 1024
INLINE_TOTAL_BYTES_MAX = 4 * 1024 * 1024


def clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Coordinator:
    """Leads one job on one checkpoint."""

    origins: dict[str, Watermark]
    """The places where event time and a watermark are declared."""
    decision: Decision | None = None
    """A decision about the parallelism that the next epoch's manifest notes."""
    newest: Epoch | None = None
    """The epoch that the next batch starts from: committed, or with batches still to come."""
    committed: Epoch | None = None
    """The newest epoch in the log."""
    committed_by: tuple[Epoch, dict[str, OperatorSpec]] | None = None
    """That epoch, if this driver has committed it, and the operators that made it."""
    batches: int = 0
    """Batches of the running epoch that have run; 0: the newest epoch is committed."""
    is_published: bool = True
    """True if the sinks have published the newest epoch in the log."""
    term: int = 0
    awake_ms: int = 0
    """The time since when this driver reads the sources."""
    is_stopping: Callable[[], bool]
    """If it returns True, the next round is the last of its batch, and nothing waits for a sink."""
    on_failure: Callable[[CairnError, int, int], None]
    """Called with each failed attempt: error, epoch and number of the attempt."""

    def __init__(
        self,
        spec: JobSpec,
        store: Store,
        sinks: Mapping[str, Sink],
        *,
        parallelism: int,
        retained_epochs: int,
        retained_s: float | None = None,
        spark_store: Store | None = None,
        attempts_max: int = 4,
        clock: Callable[[], int] = clock_ms,
        sleep: Callable[[float], None] = time.sleep,
        run_id: str | None = None,
        origins: Mapping[str, Watermark] | None = None,
        guarantee: Guarantee = "exactly-once",
        checkpoint_every: int = 1,
        commit_timeout_s: float | None = None,
        allow_dropped_output: bool = False,
        parallelism_range: range | None = None,
    ) -> None:
        self.origins = dict(origins or {})
        self.store = store
        self.log = Log(store)
        self.run_id = run_id or new_id()
        self.subtasks = Subtasks(parallelism, spec.group_count, parallelism_range)
        self.is_stopping = lambda: False
        self.on_failure = lambda error, epoch, attempt: None
        self._newest_by: dict[str, OperatorSpec] = {}
        self._guarantee = guarantee
        self._checkpoint_every = checkpoint_every
        self._publisher = Publisher(
            sinks,
            self.log,
            guarantee=guarantee,
            timeout_s=commit_timeout_s,
            allow_dropped_output=allow_dropped_output,
            clock=clock,
            sleep=sleep,
        )
        self._publisher.is_stopping = lambda: self.is_stopping()
        self._retained_epochs = retained_epochs
        self._retained_s = retained_s
        self._spark_store = spark_store
        self._attempts_max = attempts_max
        self._clock = clock
        self._job_clock = JobClock(clock)
        self._sleep = sleep
        self._collector: Collector | None = None
        self._is_swept = False
        """True once the checkpoint was searched for files of earlier leaders."""
        self._settled: dict[int, list[str]] = {}
        """Per slot, the files of its last reports that are in the newest epoch, or never will."""
        self._pending = Pending(store)
        self._full: frozenset[str] = frozenset()
        """Slots that were reported because their memory is nearly used up."""
        self._slices = Slices()
        self._rewrite: frozenset[str] = frozenset()
        self.deploy(spec)

    @property
    def paused(self) -> Paused | None:
        """The reason why no epoch begins, while a sink cannot publish."""
        return self._publisher.paused

    @property
    def dropped_batches(self) -> int:
        """Batches that a sink failed to publish, with at-most-once."""
        return self._publisher.dropped

    @property
    def last_commit_ms(self) -> float:
        """Duration of the last publication."""
        return self._publisher.last_ms

    @property
    def parallelism(self) -> int:
        return self.subtasks.parallelism

    def deploy(self, spec: JobSpec, *, rewrite: Collection[str] = ()) -> None:
        """Set the functions of later epochs. The next one rewrites the state of `rewrite`."""
        self.spec = spec
        self.operators = {op.uid: op for level in spec.levels for op in level.operators}
        states = [state for op in self.operators.values() for state in states_by_scope(op)]
        states += [feedback_state(feedback) for feedback in spec.feedbacks]
        self.scoped_states = {state.uid: state for state in states}
        # Kept until an epoch has rewritten them, even if another change comes first. Records of
        # loops are written again in every epoch.
        known = self.scoped_states.keys() - {feedback.uid for feedback in spec.feedbacks}
        self._rewrite = (self._rewrite | frozenset(rewrite)) & known

    # Starting

    def check_output(self, newest: Epoch) -> None:
        """Raise PlanError if a start of this program would lose output of the epoch."""
        self._publisher.check_output(newest)

    def take_over(
        self, *, only_if_last: int | None = None, is_held: Callable[[], bool] | None = None
    ) -> Epoch | None:
        """Become the leader: fence earlier drivers, and return the newest epoch.

        RestoreError, before anything is fenced, if a sink has published an epoch that the log
        does not have. `only_if_last` and `is_held` are those of `Log.take_over`.
        """
        check_marks(self._publisher.sinks, self.store)
        record = self.log.take_over(
            host=os.uname().nodename,
            pid=os.getpid(),
            wall_ms=self._clock(),
            guarantee=self._guarantee,
            process=f"{pid_namespace()}-{identify()}",
            only_if_last=only_if_last,
            is_held=is_held,
        )
        check_conditional_put(self.log, record, sleep=self._sleep)
        self.term = record.term
        self.newest = self.committed = self.log.newest_epoch()
        if self.newest is not None:
            self._job_clock.follow(self.newest)
            self.subtasks.continue_from(self.newest, self.spec)
        self.awake_ms = self.now_ms()
        events.log_takeover(self.spec.job_name, record, self.newest)
        self._collector = Collector(
            self.store,
            self.log,
            self._retained_epochs,
            self.term,
            keep_s=self._retained_s,
            clock_ms=self._clock,
            spark_store=self._spark_store,
        )
        self._versions = Versions(self.spec.backend, self.store, self.spec.job_id, self.term)
        crash_point("driver.takeover.written")
        return self.newest

    def adopt(self, epoch: Epoch) -> None:
        """Make a given epoch the first one of an empty checkpoint."""
        assert self.newest is None and epoch.parent is None, "only into an empty checkpoint"
        self.newest = self.committed = self.log.append(lambda number: _check_number(epoch, number))
        self._job_clock.follow(epoch)
        crash_point("driver.savepoint.loaded")

    def recover(self) -> None:
        """Publish the newest epoch again, and remove output of abandoned attempts."""
        assert self._collector is not None, "recovery follows the takeover"
        with scope(job=self.spec.job_name):
            self._publisher.recover(self.committed, self.term)
        self._pending.clear()
        self._is_swept = False
        crash_point("driver.recovered")

    # Epochs

    def run_batch(
        self,
        position: SparkPosition,
        execute: Execute,
        *,
        is_draining: bool = False,
        has_rows: bool = True,
    ) -> Epoch:
        """Run the next batch, and commit the epoch if that was its last one.

        Raises the first error if every attempt failed. `is_draining`: the input has ended, and
        all timers are due. Without `has_rows` it is one without a batch of Spark.
        """
        assert self.log.last is not None and self._collector is not None, "epochs follow a takeover"
        with scope(job=self.spec.job_name, epoch=self.log.last + 1):
            return self._run_batch(position, execute, is_draining, has_rows)

    def _run_batch(
        self, position: SparkPosition, execute: Execute, is_draining: bool, has_rows: bool
    ) -> Epoch:
        assert self.log.last is not None and self._collector is not None, "epochs follow a takeover"
        number = self.log.last + 1
        now_ms = self.now_ms()
        with pause_collector():
            division = Division(
                self.newest,
                self.scoped_states,
                self.parallelism,
                self.spec.group_count,
                self.subtasks.starts,
            )
        started = time.perf_counter()
        crash_point("driver.epoch.begun")
        attempts = Attempts(
            number,
            self._publisher,
            failures_max=self._attempts_max,
            on_failure=self.on_failure,
            clock=self._clock,
            sleep=self._sleep,
        )
        while True:
            try:
                with pause_collector():
                    begin = self._begin(
                        number, attempts.failed, now_ms, division, is_draining, has_rows
                    )
                ran = self._attempt(begin, position, execute, division, started)
                with pause_collector():
                    epoch = self._manifest(ran)
                    lost = self._collector.find_lost_paths(epoch)
                if lost:
                    raise EpochError(f"epoch {number}: collected meanwhile: {sorted(lost)[0]}")
                break
            except AssertionError:
                raise
            except Exception as error:
                failure = error
            attempts.fail(failure, is_divided=has_rows and self._divide(number, failure))
        self._publisher.resume()
        if has_rows:
            self._slices.note_fit()
        for why in sorted({r.base_failed for each in ran.reports for r in each if r.base_failed}):
            logger.warning("epoch %d: a base could not be written, %s", number, why)
        full = {r.slot_id: r for each in ran.reports for r in each if r.memory_excess}
        for slot_id in sorted(full.keys() - self._full):
            about = full[slot_id]
            logger.warning(
                "subtask %d on %s %s", about.subtask, about.executor, about.memory_excess
            )
        self._full = frozenset(full)
        if self._guarantee != "exactly-once":
            # First: a batch that is not published is not in the epoch, and is read again.
            self._check_leader(number)
            self._publisher.publish(number, ran.prepared, ran.begin.execution.batch)
            crash_point("driver.batch.published")
        self.newest = epoch
        self._newest_by = self.operators
        self.batches += 1
        self._settled = ran.list_reported(self.subtasks.slots)
        self._rewrite -= frozenset(ran.begin.rewrite)
        # Databases are written to when an epoch is committed: until then slots hold its changes.
        if self.batches >= self._checkpoint_every or (full and not self._is_local):
            self.commit_epoch()
        return self.newest

    @property
    def _is_local(self) -> bool:
        return kind_of(self.spec.backend) in ("heap", "rocksdb")

    def _divide(self, number: int, failure: Exception) -> bool:
        """Read batches in more slices if a slot was short of memory. True if they are more now."""
        is_full = isinstance(failure, CairnError) and failure.facts.get("is_full")
        if not is_full or not self._slices.grow():
            return False
        logger.warning(
            "epoch %d: a slot was short of memory; the rows of batches are read in %d slices",
            number,
            self._slices.count,
        )
        return True

    def _attempt(
        self,
        begin: Begin,
        position: SparkPosition,
        execute: Execute,
        division: Division,
        started_s: float,
    ) -> Ran:
        """Run all rounds of a batch once, and store small files. The batch began at `started_s`."""
        rounds = run_rounds(
            begin,
            lambda begin: execute(move_parts(begin, self._put_parts(begin))),
            self.spec,
            self.scoped_states,
            is_stopping=self.is_stopping,
        )
        crash_point("driver.epoch.ran")
        ran_ms = (time.perf_counter() - started_s) * 1000
        with pause_collector():
            compacted = collect_announced([r for outcome in rounds for r in outcome.reports])
            rounds, compacted = pack_small_files(self.store, rounds, compacted, self.term)
        crash_point("driver.pack.written")
        with pause_collector():
            ranges = apply_compactions(begin, division.ranges, compacted)
            acks = [ack for outcome in rounds for ack in outcome.acks]
            prepared = committables_of(acks, self._publisher.sinks)
        return Ran(begin, position, rounds, ranges, compacted, prepared, ran_ms)

    def commit_epoch(self) -> None:
        """Commit the running epoch, if there is one: write its record, then publish it."""
        if not self.batches or self.newest is None:
            return
        with scope(job=self.spec.job_name, epoch=self.newest.number):
            self._commit_epoch()

    def _commit_epoch(self) -> None:
        assert self.newest is not None and self._collector is not None, "an epoch has run"
        # The first epoch after a takeover retires none: it would read the record of each.
        oldest = self._collector.oldest_to_keep if self._is_swept else self.log.oldest_kept
        # The present time: its last batch may have been a while ago.
        epoch = msgspec.structs.replace(self.newest, wall_ms=self._clock(), oldest_kept=oldest())
        try:
            with pause_collector():
                epoch = self.log.append(lambda number: _check_number(epoch, number))
        except OSError as error:
            raise CommitError(
                f"epoch {epoch.number} is not published: {error}\n"
                "  next: fix the store, then start the job again; it runs the epoch again",
                epoch=epoch.number,
            ) from error
        crash_point("driver.manifest.written")
        self.committed_by = (epoch, self._newest_by)
        self.is_published = False
        self.newest = self.committed = epoch
        self.batches = 0
        self.decision = None
        self.subtasks.load.note(epoch, self.spec)
        self._publisher.publish_epoch(epoch)
        self.is_published = True
        events.log_epoch(epoch, self.last_commit_ms)
        crash_point("driver.sinks.committed")
        self._pending.forget()
        with pause_collector():
            self._collect(self._collector)
        self._versions.after_epoch()
        crash_point("driver.collected")

    def _collect(self, collector: Collector) -> None:
        """Remove what no epoch needs any more.

        After the first epoch also what earlier leaders have left: a takeover does not wait for it,
        because it reads every record and lists the checkpoint.
        """
        if self._is_swept:
            collector.after_epoch()
            return
        try:
            collector.sweep(time.time())
        except AssertionError:
            raise
        except Exception as error:
            logger.warning("files of earlier drivers are not removed yet: %s", error)
            return
        self._is_swept = True

    def note_published(self) -> None:
        """Write the note that the newest epoch is published: no later epoch proves it yet."""
        self._publisher.note_published()

    def _check_leader(self, number: int) -> None:
        """Raise CommitConflictError if another driver has taken over.

        Called before a batch is published that is not in the log. So batches that a fenced driver
        plans are not published, and batches it planned before are known to the new leader.
        """
        if not self.log.is_leading():
            raise CommitConflictError(
                f"another driver has taken over job {self.spec.job_name!r}\n"
                "  next: leave the job to it, or stop it and start again",
                epoch=number,
            )

    def now_ms(self) -> int:
        """Return the `now` of an epoch that would begin at this moment."""
        return self._job_clock.read_ms()

    @property
    def watermark_ms(self) -> int | None:
        return None if self.newest is None else self.newest.watermark_ms

    def _begin(
        self,
        number: int,
        attempt: int,
        now_ms: int,
        division: Division,
        is_draining: bool,
        has_rows: bool,
    ) -> Begin:
        shares = max(1, len(division.ranges) * self.parallelism)
        pending = None
        if self.newest is not None and self.batches and attempt:
            pending = self._pending.write(self.newest, self.batches)
        return Begin(
            run_id=self.run_id,
            term=self.term,
            epoch=number,
            execution=Execution(self.batches, attempt),
            parent=None if self.committed is None else self.committed.number,
            pending=pending,
            now_ms=now_ms,
            watermark_ms=MAX_MS if is_draining else self.watermark_ms,
            passed_ms=None if self.newest is None else self.newest.passed_ms,
            is_draining=is_draining,
            parallelism=self.parallelism,
            group_count=self.spec.group_count,
            inline_bytes_max=min(INLINE_BYTES_MAX, INLINE_TOTAL_BYTES_MAX // shares),
            parts=division.parts(
                self._settled,
                self.subtasks.slots,
                # Compactions read files of a committed epoch.
                None if self.batches else self.spec.backend,
            ),
            rescaled_from=self.subtasks.rescaled_from,
            rewrite=sorted(self._rewrite | division.find_redistributed()),
            slice=Slice(0, self._slices.count if has_rows else 1),
            is_divisible=has_rows and self._slices.may_grow,
        )

    def _put_parts(self, begin: Begin) -> Callable[[bytes], str]:
        execution = msgspec.structs.astuple(begin.execution)
        return lambda data: self._pending.write_parts(begin.epoch, begin.term, execution, data)

    def _manifest(self, ran: Ran) -> Epoch:
        """Return the epoch as of this batch, with its earlier batches counted in."""
        assert self._collector is not None
        begin, last = ran.begin, ran.rounds[-1]
        is_published = self._guarantee != "exactly-once"
        timings, metrics = ran.measure(
            self.spec, self.newest, self.last_commit_ms, is_published=is_published
        )
        clocks = clocks_of(self.newest).after(
            latest_times(ran.rounds),
            self.origins,
            begin.now_ms,
            ended_ms=self.now_ms(),
            awake_ms=self.awake_ms,
        )
        to_publish = {} if is_published else ran.collect_output(self.newest)
        return Epoch(
            number=begin.epoch,
            parent=begin.parent,
            term=self.term,
            nonce=new_id(),
            wall_ms=self._clock(),
            now_ms=begin.now_ms,
            watermarks=clocks.origins,
            watermark_ms=clocks.watermark_ms,
            # The watermark of a drain is artificial: operators then emit rows as old as before.
            passed_ms=begin.passed_ms if begin.is_draining else begin.watermark_ms,
            seen_ms=clocks.seen_ms,
            timers=timers_of(last.acks),
            spark=ran.position,
            operators=ran.advance_operators(self.spec, self.scoped_states, self.parallelism),
            committables=to_publish,
            targets=targets_of(self._publisher.sinks, to_publish),
            timings=timings,
            metrics=metrics,
            oldest_kept=self._collector.oldest_to_keep(),
            decision=self.decision,
        )


def _check_number(epoch: Epoch, number: int) -> Epoch:
    assert epoch.number == number, "an epoch is published under the number it ran with"
    return epoch


__all__ = ["Coordinator", "clock_ms"]
