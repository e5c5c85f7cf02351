"""A run: a job that has been started, from the takeover to the goodbye."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from cairn.coordinator.epoch import Coordinator
from cairn.coordinator.resume import check_resume
from cairn.coordinator.rewind import lay_out, read_offsets, same_offsets, settle, spark_folder
from cairn.crash import crash_point
from cairn.errors import CommitConflictError, EpochError, PlanError
from cairn.ids import new_id
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Graph
from cairn.session import check_session
from cairn.sinks.base import SinkContext
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.store import open_store
from cairn.types import type_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Status = Literal["running", "finished", "stopped", "failed"]

STOP_PATIENCE_S = 60.0


class _StoppingError(Exception):
    """Raised in Spark's thread to keep it from starting another epoch.

    Spark takes an error of this text for the interruption it caused itself by stopping
    the query, and does not report it as a failure.
    """

    def __init__(self) -> None:
        super().__init__(
            "py4j.protocol.Py4JJavaError: An error occurred while calling stop.\n"
            ": java.lang.InterruptedException"
        )


class Run:
    """A running job. Use it as a context manager: leaving the block stops the run."""

    def __init__(
        self,
        graph: Graph,
        *,
        checkpoint: str,
        parallelism: int | None,
        backend: str,
        trigger: str,
        retained_epochs: int,
        allow_dropped_state: bool,
    ) -> None:
        from cairn.backends import BACKENDS
        from cairn.coordinator.driver import SparkDriver, check_trigger

        spark = graph.sources[0].dataframe.sparkSession
        check_session(spark)
        if backend not in BACKENDS:
            raise PlanError(f"no backend {backend!r}\n  found: {', '.join(BACKENDS)}")
        parallelism = parallelism or min(spark.sparkContext.defaultParallelism, graph.group_count)
        if not 1 <= parallelism <= graph.group_count:
            raise PlanError(
                f"parallelism must be between 1 and max_parallelism ({graph.group_count}), "
                f"found {parallelism}"
            )
        check_trigger(spark, trigger)
        if retained_epochs < 1:
            raise PlanError(f"retained_epochs must be at least 1, found {retained_epochs}")
        # Spark keeps the logs of as many batches as we keep epochs, so each can be gone back to.
        spark.conf.set("spark.sql.streaming.minBatchesToRetain", max(100, 2 * retained_epochs))
        self.name = graph.name
        self.parallelism = parallelism
        self._graph = graph
        self._trigger = trigger
        self._store = open_store(checkpoint)
        job = create_or_open_job(self._store, graph.name, graph.group_count)
        spec = job_spec(graph, job_id=job.job_id, checkpoint=self._store.url, backend=backend)
        for sink in graph.sinks:
            sink.sink.open(SinkContext(job.job_id, graph.name, sink.uid, graph.input_schema(sink)))
        self._coordinator = Coordinator(
            spec,
            self._store,
            {sink.uid: sink.sink for sink in graph.sinks},
            parallelism=parallelism,
            retained_epochs=retained_epochs,
            run_id=new_id(),
        )
        self._check_resume(allow_dropped_state)
        newest = self._coordinator.take_over()
        self._position = settle(self._store, newest, self._coordinator.term)
        crash_point("driver.rewind.laid")
        self._coordinator.recover()
        self._driver = SparkDriver(
            graph, spec, spark, parallelism=parallelism, run_id=self._coordinator.run_id
        )
        self.status: Status = "running"
        self.error: BaseException | None = None
        self._epoch_lock = threading.Lock()
        self._stopping = False
        self._stop_called = threading.Event()
        self._ended = threading.Event()
        self._last: dict[str, Any] = {}
        self._query = self._start_query()
        self._supervisor = threading.Thread(
            target=self._supervise, daemon=True, name=f"cairn-{graph.name}"
        )
        self._supervisor.start()

    def _check_resume(self, allow_dropped_state: bool) -> None:
        """Before the takeover: a program that does not fit must not stop the one that runs."""
        newest = self._coordinator.log.newest_epoch()
        if newest is None:
            return
        operators = {
            uid: (
                {name: type_ddl(op.schema.field(name).type) for name in op.keys},
                self._coordinator.states[uid],
            )
            for uid, op in self._coordinator.operators.items()
        }
        check_resume(
            newest,
            operators,
            job_name=self.name,
            url=self._store.url,
            allow_dropped_state=allow_dropped_state,
        )

    def _start_query(self) -> Any:
        url = f"{self._store.url}/{self._position.folder}"
        return self._driver.start_query(url, self._trigger, self._run_epoch)

    # Epochs, on Spark's thread

    def _run_epoch(self, rows: DataFrame, batch_id: int) -> None:
        while not self._epoch_lock.acquire(timeout=0.1):
            if self._stopping:
                self._refuse_epoch()
        try:
            if self._stopping:
                self._refuse_epoch()
            self._run_batch(rows, batch_id)
            crash_point("driver.epoch.ended")
        except _StoppingError:
            raise
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            self._epoch_lock.release()

    def _refuse_epoch(self) -> None:
        # Only once Spark knows that it is being stopped is the refusal no failure to it.
        self._stop_called.wait(STOP_PATIENCE_S)
        time.sleep(0.2)
        raise _StoppingError

    def _run_batch(self, rows: DataFrame, batch_id: int) -> None:
        folder = self._position.folder
        offsets = read_offsets(self._store, folder, batch_id)
        position = SparkPosition(folder=folder, batch_id=batch_id, offsets=offsets)
        newest = self._coordinator.newest
        if newest is not None and newest.spark.folder == folder:
            if newest.spark.batch_id == batch_id and same_offsets(newest.spark.offsets, offsets):
                return  # Committed before a crash; its sinks were committed again at the start.
            if batch_id != newest.spark.batch_id + 1:
                raise EpochError(
                    f"Spark runs batch {batch_id} of {folder} after epoch {newest.number}, "
                    f"which is batch {newest.spark.batch_id}"
                )
        started = time.perf_counter()
        epoch = self._coordinator.run_epoch(
            position, lambda begin: self._driver.execute(rows, begin)
        )
        self._last = _summary(epoch, (time.perf_counter() - started) * 1000)
        self._last["commit_ms"] = round(self._coordinator.last_commit_ms, 1)

    # The end, on a thread of our own

    def _supervise(self) -> None:
        while True:
            failure: BaseException | None = None
            try:
                self._query.awaitTermination()
            except Exception as error:
                failure = error
            if self.error is None and failure is not None and not self._stopping:
                if self._go_on_elsewhere(failure):
                    continue
                self.error = self._explained(failure)
            break
        if self.error is not None:
            self.status = "failed"
        else:
            self.status = "stopped" if self._stopping else "finished"
        try:
            self._driver.say_goodbye()
            for sink in self._graph.sinks:
                sink.sink.close()
        except Exception:
            pass  # Spark may be gone already; slots end by themselves then.
        self._ended.set()

    def _go_on_elsewhere(self, failure: BaseException) -> bool:
        """A driver we have fenced still writes to Spark's folder: leave it that one."""
        from cairn.coordinator.driver import is_concurrent_use

        coordinator = self._coordinator
        if not is_concurrent_use(failure) or coordinator.newest is None:
            return False
        if coordinator.log.newest_number() != coordinator.log.last:
            return False
        folder = f"{spark_folder(coordinator.term)}-{coordinator.newest.number}"
        if folder == self._position.folder:
            return False
        lay_out(coordinator.newest, folder, source=self._store, target=self._store)
        self._position = self._position._replace(folder=folder)
        self._query = self._start_query()
        return True

    def _explained(self, failure: BaseException) -> BaseException:
        from cairn.coordinator.driver import as_cairn_error, is_concurrent_use

        if is_concurrent_use(failure):
            return CommitConflictError(
                f"another driver runs job {self.name!r} on {self._store.url}\n"
                "  next: leave the job to it, or stop it and start again"
            )
        newest = self._coordinator.newest
        return as_cairn_error(failure, 0 if newest is None else newest.number)

    # What users call

    def wait(self, timeout: float | None = None) -> bool:
        """Until the run has ended; raises what failed. False when `timeout` seconds passed."""
        # In slices, so that Ctrl-C is heard.
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(0.2):
            if deadline is not None and time.monotonic() > deadline:
                return False
        if self.error is not None:
            raise self.error
        return True

    def process_all_available(self) -> None:
        """Until everything the sources hold now is in committed epochs; raises what failed."""
        try:
            self._query.processAllAvailable()
        except Exception as error:
            self._ended.wait(STOP_PATIENCE_S)
            raise self.error or error from error

    def stop(self) -> None:
        """End the run after the epoch under way. Nothing is lost: the next start goes on."""
        self._stopping = True
        # Spark interrupts what it stops; an epoch that is let finish needs no second run.
        finished = self._epoch_lock.acquire(timeout=STOP_PATIENCE_S)
        try:
            self._stop_called.set()
            self._query.stop()
        finally:
            if finished:
                self._epoch_lock.release()
        self._ended.wait(STOP_PATIENCE_S)

    def epochs(self) -> list[dict[str, Any]]:
        """The retained epochs on the current lineage, newest first."""
        return [_summary(epoch) for epoch in Log(self._store).lineage()]

    def metrics(self) -> dict[str, Any]:
        """What the newest epoch of this run measured; empty before the first."""
        return dict(self._last)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._ended.is_set():
            self.stop()

    def __repr__(self) -> str:
        newest = self._coordinator.newest
        at = "no epoch yet" if newest is None else f"epoch {newest.number}"
        return f"<run of {self.name}: {self.status}, {at}>"


def _summary(epoch: Epoch, epoch_ms: float | None = None) -> dict[str, Any]:
    operators = epoch.metrics.get("operators", {})
    total_ms = epoch.timings.get("run_ms", 0.0) if epoch_ms is None else epoch_ms
    rows_in = sum(op["rows_in"] for op in operators.values())
    return {
        "epoch": epoch.number,
        "parent": epoch.parent,
        "wall_ms": epoch.wall_ms,
        "rows_in": rows_in,
        "rows_per_s": round(rows_in / max(total_ms, 1e-3) * 1000),
        "state_keys": sum(op["state_keys"] for op in operators.values()),
        "state_bytes": sum(
            part.state_bytes for entry in epoch.operators.values() for part in entry.ranges
        ),
        "delta_bytes": sum(op["delta_bytes"] for op in operators.values()),
        "epoch_ms": round(total_ms, 1),
        "operators": operators,
        "timings": epoch.timings,
    }
