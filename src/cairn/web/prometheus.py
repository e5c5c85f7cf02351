"""What a job measures, for Prometheus: GET /metrics, in its text format.

The figures are those of the newest committed epoch, and the totals that it keeps: so they are
there for a checkpoint without a run too, and go on when the job is started again. What every
metric means is in docs/metrics.md.

Always true here:
- a counter only falls when the job itself went back: a rollback, or a start from a savepoint;
- no label has data in it: a key is never shown here;
- the global registry of the library is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

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

from cairn.driver.coordinator.measured import summary
from cairn.report.status import STATUSES
from cairn.storage.log import read_job
from cairn.web.openapi import STRING, Docs, operation

if TYPE_CHECKING:
    from cairn.web.site import Site

Facts = Mapping[str, Any]

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
_PHASES: Final = {
    "begin": "begin_ms",
    "process": "process_ms",
    "alignment": "alignment_ms",
    "snapshot": "snapshot_ms",
    "run": "run_ms",
    "commit": "commit_ms",
}
_BACKGROUND: Final = {"base": "base_ms", "merge": "merge_ms"}


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
    registry.register(_Collector(list(families(site))))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


class _Collector:
    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def families(site: Site) -> Iterator[Metric]:
    """Every metric there is to say something of."""
    job = _job_name(site)
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
    facts = _facts(site)
    if not facts:
        return
    if site.run is None:
        yield _one("cairn_parallelism", "Subtasks of each operator.", job, facts["parallelism"])
    yield from _of_the_job(job, facts)
    yield from _of_operators(job, facts["operators"])
    yield from _of_functions(job, facts["operators"])


def _facts(site: Site) -> Facts:
    """Of the newest epoch: of this run, or else of the log."""
    measured = {} if site.run is None else site.run.metrics()
    if measured:
        return measured
    epoch = site.log.newest_epoch()
    return {} if epoch is None else summary(epoch)


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


def _of_the_job(job: str, facts: Facts) -> Iterator[Metric]:
    totals, timings = facts["totals"], facts["timings"]
    yield _one("cairn_epoch", "The number of the newest epoch.", job, facts["epoch"])
    yield _one(
        "cairn_epoch_committed_timestamp_seconds",
        "When the newest epoch was committed.",
        job,
        facts["wall_ms"] / 1000,
    )
    for name, (metric, says) in _TOTALS.items():
        if name in totals:
            yield _counter(metric, says, job, totals[name])
    yield from _times(job, facts, totals, timings)
    watermark_ms = facts["watermark_ms"]
    if watermark_ms is not None:
        yield _one("cairn_watermark_timestamp_seconds", "The watermark.", job, watermark_ms / 1000)
    yield _one(
        "cairn_in_flight_rows", "Records on their way back in loops.", job, facts["in_flight"]
    )
    if "dropped_batches" in facts:
        yield _counter(
            "cairn_dropped_batches",
            "Batches that a sink failed on in this run, with at-most-once.",
            job,
            facts["dropped_batches"],
        )


def _times(job: str, facts: Facts, totals: Facts, timings: Facts) -> Iterator[Metric]:
    last = GaugeMetricFamily(
        "cairn_last_epoch_phase_seconds",
        "Where the time of the newest epoch went.",
        labels=(JOB, "phase"),
    )
    every = SummaryMetricFamily(
        "cairn_epoch_phase_seconds", "Where the time of epochs went.", labels=(JOB, "phase")
    )
    alignment = timings.get("alignment_ms") or {}
    newest = {
        **timings,
        "alignment_ms": sum(ms or 0 for ms in alignment.values()),
        "commit_ms": facts.get("commit_ms", timings.get("last_commit_ms")),
    }
    for phase, name in _PHASES.items():
        if newest.get(name) is not None:
            last.add_metric((job, phase), newest[name] / 1000)
        if name in totals:
            # The newest epoch is not published yet when its totals are written.
            count = totals["commits"] if phase == "commit" else totals["epochs"]
            every.add_metric((job, phase), count, totals[name] / 1000)
    yield last
    yield every
    beside = CounterMetricFamily(
        "cairn_background_seconds",
        "Time that slots spent on files beside the epochs.",
        labels=(JOB, "kind"),
    )
    for kind, name in _BACKGROUND.items():
        if name in totals:
            beside.add_metric((job, kind), totals[name] / 1000)
    yield beside


def _of_operators(job: str, operators: Facts) -> Iterator[Metric]:
    labels = (JOB, "operator")
    for name, (metric, says) in _OPERATOR_TOTALS.items():
        total = CounterMetricFamily(metric, says, labels=labels)
        for uid, measured in operators.items():
            if name in measured.get("totals", {}):
                total.add_metric((job, uid), measured["totals"][name])
        yield total
    for name, (metric, says) in _OPERATOR_NOW.items():
        held = GaugeMetricFamily(metric, says, labels=labels)
        for uid, measured in operators.items():
            if measured.get(name) is not None:
                held.add_metric((job, uid), measured[name])
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
        if measured.get("alignment_ms") is not None:
            waited.add_metric((job, uid), measured["alignment_ms"] / 1000)
        rows = measured.get("subtask_rows") or [0]
        if sum(rows):
            skew.add_metric((job, uid), max(rows) * len(rows) / sum(rows))
            hot = measured.get("hot_keys") or [{"rows": 0}]
            if "hot_keys" in measured:
                hottest.add_metric((job, uid), min(1.0, hot[0]["rows"] / sum(rows)))
    yield from (waited, skew, hottest)


def _of_functions(job: str, operators: Facts) -> Iterator[Metric]:
    """What functions count. A name that is of two kinds has the second kind behind it."""
    found: dict[str, Metric] = {}
    for kind, family in _FAMILIES.items():
        for uid, measured in operators.items():
            for name, value in measured.get("user", {}).get(kind, {}).items():
                called = f"cairn_user_{name}"
                taken = found.get(called)
                if taken is not None and not isinstance(taken, family):
                    called += f"_{kind.removesuffix('s')}"
                says = f"{name}, counted by functions of the job."
                made = found.setdefault(called, family(called, says, labels=(JOB, "operator")))
                _add(made, (job, uid), value)
    yield from found.values()


def _add(family: Metric, labels: tuple[str, str], value: Any) -> None:
    if isinstance(family, HistogramMetricFamily):
        buckets = [(_bound(bound), count) for bound, count in value["buckets"]]
        family.add_metric(labels, [*buckets, ("+Inf", value["count"])], value["sum"])
    else:
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)


def _bound(bound: float) -> str:
    return repr(float(bound))


_FAMILIES: Final = {
    "counters": CounterMetricFamily,
    "gauges": GaugeMetricFamily,
    "histograms": HistogramMetricFamily,
}
