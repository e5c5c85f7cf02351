"""The figures of a job for Prometheus: GET /metrics, in its text format.

They are those of the newest committed epoch, and the totals that it keeps. So a checkpoint has
them without a run too, and they go on when the job is started again. docs/metrics.md explains
every metric.

Always true here:
- a counter only falls when the job itself went back: a rollback, or a start from a savepoint;
- no label has data in it: a key is never shown here;
- the global registry of the library is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.driver.coordinator.reports import report_of
from cairn.metrics import HistogramCounts, Number
from cairn.report.epoch import EpochReport, OperatorReport
from cairn.report.scaling import ScalingReport
from cairn.report.status import ACTIVE, STATUSES, Restart
from cairn.storage.log import read_job
from cairn.web.openapi import STRING, Docs, operation

if TYPE_CHECKING:
    from cairn.web.site import LiveRun, Site

JOB: Final = "job_name"
"""Not "job": Prometheus puts a label of that name on all that it scrapes."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_OPERATOR_TOTALS: Final = {
    "rows_in": ("cairn_rows_in", "Rows that came to an operator."),
    "rows_out": ("cairn_rows_out", "Rows that an operator emitted."),
    "late_rows": ("cairn_late_rows", "Rows that came too late and were not processed."),
    "untimed_rows": ("cairn_untimed_rows", "Rows without an event time, not processed."),
    "error_rows": ("cairn_error_rows", "Rows and timers put aside as dead letters."),
    "entries_changed": ("cairn_entries_changed", "Entries of state that epochs have changed."),
    "delta_bytes": ("cairn_delta_bytes", "Bytes of state that epochs have written."),
}
_OPERATOR_NOW: Final = {
    "state_keys": ("cairn_state_keys", "Keys that hold state of an operator."),
    "state_entries": ("cairn_state_entries", "Entries of an operator's state: rows it stores."),
    "state_bytes": ("cairn_state_bytes", "Bytes of an operator's state in files."),
}
_TOTALS: Final = {
    "epochs": ("cairn_epochs", "Epochs that were committed."),
    "attempts": ("cairn_epoch_attempts", "Attempts at committed epochs, those that failed too."),
    "restored": ("cairn_restored_subtasks", "Subtasks that read their state from storage."),
    "bases": ("cairn_bases", "Bases that were written in the background."),
    "base_bytes": ("cairn_base_bytes", "Bytes of bases and merged deltas written."),
}


def routes(site: Site) -> list[Route]:
    def metrics(request: Request) -> Response:
        return Response(render(site), headers={"content-type": CONTENT_TYPE})

    return [Route("/metrics", metrics)]


DOCS: Final[Docs] = {
    "/metrics": {
        "get": operation(
            "What the job measures, in the text format of Prometheus",
            answer=STRING,
            content_type="text/plain",
            errors=(409,),
        )
    }
}


def render(site: Site) -> str:
    """The text of a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(families(site))))
    return generate_latest(registry).decode()


class _Collector:
    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def families(site: Site) -> Iterator[Metric]:
    """Yield every metric that has a value."""
    job = _job_name(site)
    if site.run is not None and site.run.is_waiting:
        # The figures of the job are the leader's: they must not be counted twice.
        yield _status(job, site.run.status)
        yield from _of_the_lead(job, site.run)
        return
    health = site.health()
    yield _status(job, health.status)
    yield _one(
        "cairn_rows_per_second",
        "Rows that come to operators now, in the last seconds.",
        job,
        health.rates.rows_per_s,
    )
    if health.lag_ms is not None:
        yield _one(
            "cairn_watermark_lag_seconds",
            "How far the watermark is behind the clock now.",
            job,
            health.lag_ms / 1000,
        )
    if site.run is not None:
        yield _one("cairn_parallelism", "Subtasks of each operator.", job, site.run.parallelism)
        yield from _of_the_lead(job, site.run)
        yield from _of_scaling(job, site.run.scaling)
    newest = _newest(site)
    if newest is None:
        return
    if site.run is None:
        yield _one("cairn_parallelism", "Subtasks of each operator.", job, newest.parallelism)
    yield from _of_the_job(job, newest)
    yield from _times(job, newest)
    yield from _of_operators(job, newest.operators)
    yield from _of_functions(job, newest.operators)


def _of_the_lead(job: str, run: LiveRun) -> Iterator[Metric]:
    is_leading = float(run.status in ACTIVE and not run.is_waiting)
    yield _one("cairn_is_leader", "1 while this process leads the job.", job, is_leading)
    yield _counter(
        "cairn_failovers",
        "Times that this process has continued the job of another one.",
        job,
        run.failovers,
    )
    yield _counter(
        "cairn_restarts", "Times that the run has begun again after a failure.", job, run.restarts
    )
    restarts = run.restart_history()
    if restarts:
        yield _of_restart(job, restarts[-1])


def _of_restart(job: str, last: Restart) -> Metric:
    says = "Pause before the last restart; the label is the kind of error that it followed."
    family = GaugeMetricFamily("cairn_last_restart_pause_seconds", says, labels=(JOB, "kind"))
    family.add_metric((job, last.kind), last.pause_ms / 1000)
    return family


def _of_scaling(job: str, scaling: ScalingReport) -> Iterator[Metric]:
    decision = scaling.decision
    if decision is not None:
        name, says = "cairn_autoscale_target", "Subtasks that autoscaling asks for."
        yield _one(name, says, job, decision.target)
        if decision.utilisation is not None:
            says = "Share of the time in which the busiest subtask worked."
            yield _one("cairn_utilisation_ratio", says, job, decision.utilisation)
    made = sum(each.is_applied for each in scaling.changes)
    yield _counter("cairn_rescales", "Changes of the parallelism in this run.", job, made)
    known = {name: rows for name, rows in scaling.backlog.items() if rows is not None}
    if known:
        family = GaugeMetricFamily(
            "cairn_backlog_rows", "Rows that a source has and the job has not read.",
            labels=(JOB, "source"),
        )  # fmt: skip
        for source, rows in known.items():
            family.add_metric((job, source), rows)
        yield family


def _newest(site: Site) -> EpochReport | None:
    """Return the newest epoch: of this run, or else of the log."""
    newest = None if site.run is None else site.run.metrics()
    if newest is not None:
        return newest
    epoch = site.log.newest_epoch()
    return None if epoch is None else report_of(epoch)


def _job_name(site: Site) -> str:
    if site.run is not None:
        return site.run.name
    job = read_job(site.store)
    return "" if job is None else job.name


def _status(job: str, status: str) -> Metric:
    family = GaugeMetricFamily(
        "cairn_job_status", "1 for the status of the job, 0 for the others.", labels=(JOB, "status")
    )
    for each in STATUSES:
        family.add_metric((job, each), float(each == status))
    return family


def _one(name: str, says: str, job: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, says, labels=(JOB,))
    family.add_metric((job,), value)
    return family


def _counter(name: str, says: str, job: str, value: float) -> Metric:
    family = CounterMetricFamily(name, says, labels=(JOB,))
    family.add_metric((job,), value)
    return family


def _of_the_job(job: str, newest: EpochReport) -> Iterator[Metric]:
    yield _one("cairn_epoch", "The number of the newest epoch.", job, newest.epoch)
    yield _one(
        "cairn_epoch_committed_timestamp_seconds",
        "When the newest epoch was committed.",
        job,
        newest.wall_ms / 1000,
    )
    if newest.totals is not None:
        for name, (metric, says) in _TOTALS.items():
            yield _counter(metric, says, job, getattr(newest.totals, name))
    watermark_ms = newest.watermark_ms
    if watermark_ms is not None:
        yield _one("cairn_watermark_timestamp_seconds", "The watermark.", job, watermark_ms / 1000)
    yield _one("cairn_in_flight_rows", "Records on their way back in loops.", job, newest.in_flight)
    if newest.dropped_batches is not None:
        yield _counter(
            "cairn_dropped_batches",
            "Batches that a sink failed on in this run, with at-most-once.",
            job,
            newest.dropped_batches,
        )


def _times(job: str, newest: EpochReport) -> Iterator[Metric]:
    last = GaugeMetricFamily(
        "cairn_last_epoch_phase_seconds",
        "Where the time of the newest epoch went.",
        labels=(JOB, "phase"),
    )
    timings, totals = newest.timings, newest.totals
    commit_ms = timings.last_commit_ms if newest.commit_ms is None else newest.commit_ms
    phases = {
        "begin": timings.begin_ms,
        "process": timings.process_ms,
        "alignment": sum(ms or 0.0 for ms in timings.alignment_ms.values()),
        "snapshot": timings.snapshot_ms,
        "run": timings.run_ms,
        "commit": commit_ms,
    }
    for phase, ms in phases.items():
        if ms is not None:
            last.add_metric((job, phase), ms / 1000)
    yield last
    if totals is None:
        return
    every = SummaryMetricFamily(
        "cairn_epoch_phase_seconds", "Where the time of epochs went.", labels=(JOB, "phase")
    )
    for phase in phases:
        # The newest epoch is not published yet when its totals are written.
        count = totals.commits if phase == "commit" else totals.epochs
        every.add_metric((job, phase), count, getattr(totals, f"{phase}_ms") / 1000)
    yield every
    beside = CounterMetricFamily(
        "cairn_background_seconds",
        "Time that slots spent on files beside the epochs.",
        labels=(JOB, "kind"),
    )
    beside.add_metric((job, "base"), totals.base_ms / 1000)
    beside.add_metric((job, "merge"), totals.merge_ms / 1000)
    yield beside


def _of_operators(job: str, operators: Mapping[str, OperatorReport]) -> Iterator[Metric]:
    labels = (JOB, "operator")
    for name, (metric, says) in _OPERATOR_TOTALS.items():
        total = CounterMetricFamily(metric, says, labels=labels)
        for uid, measured in operators.items():
            if measured.totals is not None:
                total.add_metric((job, uid), getattr(measured.totals, name))
        yield total
    for name, (metric, says) in _OPERATOR_NOW.items():
        held = GaugeMetricFamily(metric, says, labels=labels)
        for uid, measured in operators.items():
            value = getattr(measured, name)
            if value is not None:
                held.add_metric((job, uid), value)
        yield held
    waited = GaugeMetricFamily(
        "cairn_operator_alignment_seconds",
        "How long the input of an operator was half there, in the newest epoch.",
        labels=labels,
    )
    skew = GaugeMetricFamily(
        "cairn_skew_ratio",
        "Rows of the busiest subtask over those of the average one, in the newest epoch.",
        labels=labels,
    )
    hottest = GaugeMetricFamily(
        "cairn_hottest_key_ratio",
        "About which share of an operator's rows the hottest key has, in the newest epoch.",
        labels=labels,
    )
    for uid, measured in operators.items():
        if measured.alignment_ms is not None:
            waited.add_metric((job, uid), measured.alignment_ms / 1000)
        rows = sum(measured.subtask_rows)
        if rows:
            busiest = max(measured.subtask_rows) * len(measured.subtask_rows)
            skew.add_metric((job, uid), busiest / rows)
            if measured.group_rows:  # It has keys.
                hot = measured.hot_keys[0].rows if measured.hot_keys else 0
                hottest.add_metric((job, uid), min(1.0, hot / rows))
    yield from (waited, skew, hottest)


def _of_functions(job: str, operators: Mapping[str, OperatorReport]) -> Iterator[Metric]:
    """Yield the metrics of functions. If a name is of two kinds, the second has its kind added."""
    found: dict[str, Metric] = {}
    for kind, family in _FAMILIES.items():
        for uid, measured in operators.items():
            counted = {} if measured.user is None else getattr(measured.user, f"{kind}s")
            for name, value in counted.items():
                called = f"cairn_user_{name}"
                taken = found.get(called)
                if taken is not None and not isinstance(taken, family):
                    called += f"_{kind}"
                says = f"{name}, counted by functions of the job."
                made = found.setdefault(called, family(called, says, labels=(JOB, "operator")))
                _add(made, (job, uid), value)
    yield from found.values()


def _add(family: Metric, labels: tuple[str, str], value: HistogramCounts | Number | None) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, HistogramCounts)
        buckets = [(_bound(bound), count) for bound, count in value.buckets]
        family.add_metric(labels, [*buckets, ("+Inf", value.count)], value.sum)
    elif value is not None:
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        assert not isinstance(value, HistogramCounts)
        family.add_metric(labels, value)


def _bound(bound: float) -> str:
    return repr(float(bound))


_FAMILIES: Final = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
