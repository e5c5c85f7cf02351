"""What Prometheus is told: right in form, true to the epochs, the same with and without a run."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cairn.driver.coordinator.reports import report_of
from cairn.driver.serving import Serve
from cairn.metrics import HistogramCounts, UserMetrics
from cairn.report.epoch import EpochReport, OperatorReport, Timings
from cairn.report.scaling import Decision, ScalingReport
from cairn.report.status import STATUSES, Restart
from cairn.web.app import make_app
from cairn.web.prometheus import CONTENT_TYPE, render
from cairn.web.site import Site
from tests.unit.driver.coordinator.leads import Lead, run_counting
from tests.unit.report.reports import operator_report

DOCS = Path(__file__).parents[3] / "docs"
GRAFANA = DOCS / "grafana" / "cairn.json"
DECISION = Decision(kind="up", parallelism=1, target=2, reason="", wall_ms=5, utilisation=0.9)
SCALING = ScalingReport(
    mode="on",
    decision=DECISION,
    changes=[DECISION, msgspec.structs.replace(DECISION, is_applied=False)],
    backlog={"rows": 7, "files": None},
)


RESTART = Restart(
    number=3, wall_ms=1, pause_ms=1500, kind="OSError", cause="away", host="h", pid=1
)  # fmt: skip


@pytest.fixture
def lead(tmp_path: Path) -> Lead:
    return Lead(tmp_path, parallelism=2).start()


def site_of(lead: Lead, run: Any = None) -> Site:
    return Site("memory:", run=run, store=lead.store)


def run_of(lead: Lead, **facts: Any) -> Any:
    """What is asked of a run, of a job that a test leads."""
    newest = lead.coordinator.committed
    measured = None if newest is None else report_of(newest, 12.5)
    if measured is not None:
        measured = msgspec.structs.replace(measured, **facts)
    return SimpleNamespace(
        name=lead.spec.job_name,
        status="running",
        paused=None,
        error=None,
        history=lambda: [] if measured is None else [measured],
        parallelism=2,
        failovers=1,
        scaling=SCALING,
        restarts=3,
        restart_history=lambda: [RESTART],
        is_waiting=False,
        metrics=lambda: measured,
    )


def samples(text: str) -> dict[tuple[str, ...], float]:
    """{(name, label value, ...): value}; the job's name left out."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "job_name"}
            at = (sample.name, *(labels[name] for name in sorted(labels, reverse=True)))
            assert at not in found, f"{at} is there twice"
            found[at] = sample.value
    return found


USER = {
    "count": UserMetrics(
        {"seen": 3, "odd": 0.5},
        {"level": -2.5},
        {"sizes": HistogramCounts(3, 12.5, [(1.0, 1), (10.0, 2)])},
    )
}


def test_figures_are_those_of_the_newest_epoch_and_totals_of_all(lead: Lead) -> None:
    lead.run_batch((1, 1), (2, 2), (3, 3))
    epoch = lead.run_batch((1, 1))
    found = samples(render(site_of(lead)))
    assert found["cairn_epoch",] == epoch.number
    assert found["cairn_epochs_total",] == 2
    assert found["cairn_epoch_attempts_total",] == 2
    assert found["cairn_rows_in_total", "count"] == 4
    assert found["cairn_state_keys", "count"] == epoch.metrics.operators["count"].state_keys
    assert found["cairn_state_bytes", "count"] == report_of(epoch).state_bytes > 0
    assert found["cairn_parallelism",] == 2
    assert found["cairn_skew_ratio", "count"] == 2.0
    assert found["cairn_epoch_phase_seconds_count", "process"] == 2
    assert found["cairn_epoch_phase_seconds_count", "commit"] == 1
    run_s = found["cairn_last_epoch_phase_seconds", "run"]
    assert run_s == pytest.approx(epoch.timings.run_ms / 1000)
    assert found["cairn_epoch_phase_seconds_sum", "run"] >= run_s
    assert found["cairn_epoch_committed_timestamp_seconds",] == epoch.wall_ms / 1000


def test_what_functions_count_is_there(lead: Lead) -> None:
    run_counting(lead, USER)
    run_counting(lead, USER)
    found = samples(render(site_of(lead)))
    assert found["cairn_user_seen_total", "count"] == 6
    assert found["cairn_user_odd_total", "count"] == 1.0
    assert found["cairn_user_level", "count"] == -2.5
    assert found["cairn_user_sizes_bucket", "count", "10.0"] == 4
    assert found["cairn_user_sizes_bucket", "count", "+Inf"] == 6
    assert found["cairn_user_sizes_count", "count"] == 6
    assert found["cairn_user_sizes_sum", "count"] == 25.0


def test_a_name_of_two_kinds_is_two_metrics(lead: Lead) -> None:
    run_counting(lead, USER)
    run = run_of(lead)
    other = operator_report(user=UserMetrics({}, {"seen": 1.0, "sizes": 2.0}))
    measured = run.metrics()
    measured = msgspec.structs.replace(measured, operators={**measured.operators, "other": other})
    run.metrics = lambda: measured
    found = samples(render(site_of(lead, run)))
    assert found["cairn_user_seen_gauge", "other"] == 1.0
    assert found["cairn_user_sizes", "other"] == 2.0
    assert found["cairn_user_sizes_histogram_count", "count"] == 3


def test_counters_never_fall_from_epoch_to_epoch_or_run_to_run(lead: Lead, tmp_path: Path) -> None:
    before: dict[tuple[str, ...], float] = {}
    for parallelism in (2, 3):
        again = Lead(tmp_path, lead.store, parallelism=parallelism).start()
        for rows in ([(1, 1), (2, 2)], [], [(3, 3)]):
            run_counting(again, USER, rows=rows)
            found = samples(render(site_of(again)))
            counted = {
                at: n for at, n in found.items() if re.search("_(total|count|sum|bucket)$", at[0])
            }
            assert before.keys() <= counted.keys()
            assert all(counted[at] >= n for at, n in before.items())
            before = counted
    assert before["cairn_epochs_total",] == 6


def test_every_metric_says_what_it_is_in_base_units(lead: Lead) -> None:
    run_counting(lead, USER)
    text = render(site_of(lead, run_of(lead, dropped_batches=0)))
    names = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    assert names and names == set(re.findall(r"^# HELP (\S+) \S", text, re.M))
    for kind, name in [(k, n) for n, k in re.findall(r"^# TYPE (\S+) (\S+)", text, re.M)]:
        assert name.startswith("cairn_") and not name.endswith(("_ms", "_kb"))
        assert name.endswith("_total") == (kind == "counter"), name
    assert all('job_name="' in line for line in text.splitlines() if not line.startswith("#"))


def test_a_run_adds_its_status_and_its_last_commit(lead: Lead) -> None:
    found = samples(render(site_of(lead, run_of(lead))))
    statuses = {at[1]: n for at, n in found.items() if at[0] == "cairn_job_status"}
    assert statuses == {**dict.fromkeys(STATUSES, 0.0), "running": 1.0}
    lead_metrics = ("cairn_is_leader", "cairn_failovers_total", "cairn_restarts_total")
    assert [found[name,] for name in lead_metrics] == [1, 1, 3]
    assert found["cairn_last_restart_pause_seconds", "OSError"] == 1.5
    assert ("cairn_epoch",) not in found, "there is none yet"
    lead.run_batch((1, 1))
    found = samples(render(site_of(lead, run_of(lead, dropped_batches=2))))
    assert found["cairn_last_epoch_phase_seconds", "commit"] == 0.0125
    assert found["cairn_dropped_batches_total",] == 2


def test_a_run_without_an_epoch_of_its_own_shows_the_last_one_of_before(lead: Lead) -> None:
    epoch = lead.run_batch((1, 1))
    run = run_of(lead)
    run.metrics = lambda: None
    assert samples(render(site_of(lead, run)))["cairn_epoch",] == epoch.number


def test_the_watermark_and_its_lag_are_there_where_there_is_one(lead: Lead) -> None:
    lead.run_batch((1, 1))
    run = run_of(lead, watermark_ms=4_000, wall_ms=9_500)
    found = samples(render(site_of(lead, run)))
    assert found["cairn_watermark_timestamp_seconds",] == 4.0
    assert found["cairn_watermark_lag_seconds",] > 10**9, "of now, not of the commit"
    assert ("cairn_watermark_lag_seconds",) not in samples(render(site_of(lead)))


def test_keys_are_never_shown(lead: Lead) -> None:
    lead.run_batch(*[(987654, n) for n in range(50)])
    text = render(site_of(lead))
    assert "987654" not in text
    assert samples(text)["cairn_hottest_key_ratio", "count"] == 1.0


def test_an_epoch_of_an_older_cairn_can_be_shown(lead: Lead) -> None:
    lead.run_batch((1, 1))
    operators = {"count": operator_report(rows_in=1)}
    run = run_of(lead, operators=operators, totals=None, timings=Timings())
    assert samples(render(site_of(lead, run)))["cairn_epoch",] == 2


def test_a_checkpoint_without_an_epoch_has_a_status_and_no_figures(tmp_path: Path) -> None:
    lead = Lead(tmp_path)
    for _ in ("no record at all", "a takeover and no epoch"):
        found = samples(render(site_of(lead)))
        assert {at[0] for at in found} == {"cairn_job_status", "cairn_rows_per_second"}
        assert sum(found["cairn_job_status", each] for each in STATUSES) == 1.0
        lead.start()


def test_the_libraries_own_registry_is_left_alone(lead: Lead) -> None:
    lead.run_batch((1, 1))
    before = prometheus_client.generate_latest()
    render(site_of(lead))
    assert b"cairn" not in prometheus_client.generate_latest() and b"cairn" not in before


def test_the_page_needs_the_token_like_all_others(lead: Lead) -> None:
    lead.run_batch((1, 1))
    token = "sixteen-and-more-characters"
    app = make_app(Site("memory:", Serve(token=token), store=lead.store))

    async def ask(method: str, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, "/metrics", headers=headers)

    assert asyncio.run(ask("GET")).status_code == 401
    answer = asyncio.run(ask("GET", authorization=f"Bearer {token}"))
    assert answer.status_code == 200 and answer.headers["content-type"] == CONTENT_TYPE
    assert samples(answer.text)["cairn_epochs_total",] == 1
    assert asyncio.run(ask("POST", authorization=f"Bearer {token}")).status_code == 405


def test_autoscaling_is_exported_with_the_backlog_of_sources_that_report_it(lead: Lead) -> None:
    lead.run_batch((1, 1))
    found = samples(render(site_of(lead, run_of(lead))))
    assert found["cairn_autoscale_target",] == 2
    assert found["cairn_utilisation_ratio",] == 0.9
    assert found["cairn_rescales_total",] == 1, "one was only observed"
    assert [at for at in found if at[0] == "cairn_backlog_rows"] == [("cairn_backlog_rows", "rows")]


# The dashboard of Grafana


def exported(lead: Lead) -> set[str]:
    run_counting(lead, USER)
    count = run_of(lead).metrics().operators["count"]
    operators = {"count": msgspec.structs.replace(count, alignment_ms=1.0)}
    run = run_of(lead, dropped_batches=0, watermark_ms=1, operators=operators)
    return {at[0] for at in samples(render(site_of(lead, run)))}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for p in board["panels"] if p["type"] != "row"]


def test_the_page_of_metrics_has_every_name(lead: Lead) -> None:
    page = (DOCS / "metrics.md").read_text()
    known = {re.sub(r"_seconds_(sum|count)$", "_seconds", name) for name in exported(lead)}
    told = set(re.findall(r"`(cairn_[a-z_]+)[`{]", page))
    assert not {name for name in known - told if not name.startswith("cairn_user_")}
    fields = {*EpochReport.__struct_fields__, *OperatorReport.__struct_fields__}
    assert not {name for name in fields - {"term"} if f"`{name}`" not in page}


def test_grafana_asks_only_for_what_is_exported(lead: Lead) -> None:
    board = json.loads(GRAFANA.read_text())
    known = exported(lead)
    queries = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    queries += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"\bcairn_[a-z_]+", str(query))}
    asked.discard("cairn_user_")  # By a pattern: they are the functions' own.
    assert asked and asked <= known, sorted(asked - known)
    left = {name for name in known - asked if not name.startswith("cairn_user_")}
    assert left == {"cairn_bases_total", "cairn_background_seconds_total"}


def test_grafana_has_panels_that_do_not_overlap_and_know_their_data() -> None:
    board = json.loads(GRAFANA.read_text())
    assert board["title"] == "cairn" and board["schemaVersion"] >= 36
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    for panel in panels(board):
        assert panel["datasource"]["uid"] == "${datasource}" and panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert 'job_name="$job"' in target["expr"]
