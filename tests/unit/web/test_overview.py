"""The facts behind the dashboard's pages: of a checkpoint, with and without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from cairn.driver.coordinator.reports import report_of
from cairn.errors import FunctionError
from cairn.report.epoch import (
    NOTHING_MEASURED,
    PARTS,
    LetterSample,
    Measured,
    Timings,
    split_time,
)
from cairn.report.job_graph import JobGraph
from cairn.snapshots.rollback import rollback
from cairn.storage.failures import Failures
from cairn.storage.log import Log
from cairn.storage.notes import SavepointNote, write_graph, write_savepoint_note
from cairn.storage.store import open_store
from cairn.web import overview
from cairn.web.trail import Trail
from tests.unit.snapshots.checkpoints import UID, Checkpoint, value
from tests.unit.web.sites import CONTROL, TOKEN, FakeRun, client, site_of

SVG = "{http://www.w3.org/2000/svg}"
GRAPH: dict[str, Any] = {
    "job": "shop",
    "max_parallelism": 8,
    "chaining": True,
    "max_rounds_per_epoch": 1,
    "sources": [{"name": "sales", "columns": ["k"], "watermark_ms": 5000, "event_time": "at"}],
    "transforms": [],
    "event_times": [],
    "operators": [
        {"uid": UID, "function": "Count", "keys": {"k": "bigint"}, "level": 0, "chained": False}
    ],
    "sinks": [{"uid": "out", "sink": "Files", "level": 0, "chained": True}],
    "loops": [],
    "edges": [
        {"from": {"node": "sales", "side": None}, "to": UID, "input": None, "way": "keyed",
         "shuffle": 0, "by": ["k"], "in_order_of": None},
        {"from": {"node": UID, "side": None}, "to": "out", "input": None, "way": "chain",
         "shuffle": None, "by": [], "in_order_of": None},
    ],
    "levels": [
        {"level": 0, "chains": [[UID, "out"]], "feedback": [], "shuffles": [0], "passing": []}
    ],
}  # fmt: skip


def job_graph(**other: Any) -> JobGraph:
    return msgspec.convert({**GRAPH, **other}, JobGraph)


def ask(checkpoint: Checkpoint, path: str, run: Any = None, status: int = 200) -> Any:
    response = client(site_of(checkpoint, run)).get(path)
    assert response.status_code == status, response.text
    return response.json()


def test_a_job_that_runs_elsewhere_is_known_by_its_checkpoint(checkpoint: Checkpoint) -> None:
    found = ask(checkpoint, "/api/job")
    assert (found["name"], found["status"], found["live"]) == ("shop", "unknown", False)
    assert found["epoch"]["epoch"] == 3 and found["control"] is False
    assert found["leader"]["term"] == 1


def test_a_job_that_runs_here_says_how_it_goes(checkpoint: Checkpoint) -> None:
    found = ask(checkpoint, "/api/job", FakeRun(checkpoint))
    assert (found["status"], found["live"], found["parallelism"]) == ("running", True, 2)


def test_control_is_told_only_where_there_is_a_token_for_it(checkpoint: Checkpoint) -> None:
    site = site_of(checkpoint, FakeRun(checkpoint), control_token=CONTROL)
    assert client(site).get("/api/job").json()["control"] is True


def test_a_job_without_an_epoch_has_none(folder: Path) -> None:
    empty = Checkpoint({"n": value("bigint")}, store=open_store(str(folder)))
    assert ask(empty, "/api/job")["epoch"] is None
    assert ask(empty, "/api/epochs")["epochs"] == []


@pytest.mark.parametrize(
    "path", ["/api/groups", "/api/state", "/api/state/count/n", "/api/state/count/n/1"]
)
def test_before_the_first_epoch_reads_are_to_come_again_not_gone(folder: Path, path: str) -> None:
    empty = Checkpoint({"n": value("bigint")}, store=open_store(str(folder)))
    answer = client(site_of(empty)).get(path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "no-epoch"
    assert "wait for the first one" in answer.json()["error"]["next"]


def test_epochs_are_newest_first_and_can_be_paged(checkpoint: Checkpoint) -> None:
    assert [e["epoch"] for e in ask(checkpoint, "/api/epochs")["epochs"]] == [3, 2]
    assert [e["epoch"] for e in ask(checkpoint, "/api/epochs?limit=1")["epochs"]] == [3]
    assert [e["epoch"] for e in ask(checkpoint, "/api/epochs?before=3")["epochs"]] == [2]
    assert ask(checkpoint, "/api/epochs?limit=0", status=400)["error"]["code"] == "bad-request"


def test_one_epoch_is_shown_whole_and_one_that_is_not_kept_is_not_found(
    checkpoint: Checkpoint,
) -> None:
    found = ask(checkpoint, "/api/epochs/3")
    assert found["epoch"] == 3 and set(found["parts"]) == set(PARTS)
    assert found["sources"] == [{"name": "rows", "offset": {"n": 3}}]
    for number in ("1", "99"):  # A takeover, and nothing.
        assert ask(checkpoint, f"/api/epochs/{number}", status=404)["error"]["code"] == "not-found"
    assert ask(checkpoint, "/api/epochs/x", status=400)


def test_the_graph_is_what_the_last_start_has_written(checkpoint: Checkpoint) -> None:
    assert ask(checkpoint, "/api/graph") == {"term": None, "graph": None, "drawing": None}
    for term in range(1, 10):
        write_graph(checkpoint.store, term, job_graph(job=f"shop {term}"))
    found = ask(checkpoint, "/api/graph")
    assert (found["term"], found["graph"]["job"]) == (9, "shop 9")
    drawing = ElementTree.fromstring(found["drawing"])
    boxes = {
        box.attrib["data-node"]: float(box.find(f"{SVG}rect").attrib["x"])  # type: ignore[union-attr]
        for box in drawing.iter(f"{SVG}g")
    }
    assert set(boxes) == {"sales", UID, "out"}
    assert boxes["sales"] < boxes[UID] < boxes["out"]
    assert len([path for path in drawing.iter(f"{SVG}path") if "class" in path.attrib]) == 2
    assert [link.attrib["href"] for link in drawing.iter(f"{SVG}a")] == [f"#/operators/{UID}"]
    assert len(checkpoint.store.list("graph")) == 5


def test_key_groups_are_counted_from_the_indexes_of_files(checkpoint: Checkpoint) -> None:
    found = ask(checkpoint, f"/api/groups?operator={UID}")
    assert checkpoint.newest is not None
    entry = checkpoint.newest.operators[UID]
    stored = found["groups"]["stored_rows"]
    rows = sum(ref.rows for part in entry.ranges for ref in part.files)
    assert len(stored) == 8 and sum(stored) == rows and found["groups"]["is_exact"]
    assert [part["group_count"] for part in found["subtasks"]] == [4, 4]
    assert found["skew"]["state_entries"] is None or found["skew"]["state_entries"] >= 1.0
    assert ask(checkpoint, "/api/groups?operator=nobody", status=404)


def test_savepoints_and_starts_and_rollbacks_are_told(checkpoint: Checkpoint) -> None:
    write_savepoint_note(
        checkpoint.store,
        SavepointNote(id="s1", url="file:///away/s1", epoch=3, created_ms=7, bytes=9),
    )
    rollback(checkpoint.store, 2)
    found = ask(checkpoint, "/api/points")
    assert [each["url"] for each in found["savepoints"]] == ["file:///away/s1"]
    assert [each["kind"] for each in found["records"]] == ["restore", "takeover"]
    assert [each["epoch"] for each in found["rolled_back"]] == [3]
    assert found["branches"] == [] and found["origin"] is None


def test_of_a_long_log_only_the_newest_records_are_read_for_its_points(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        checkpoint.commit({"n": {0: 1}})
    rollback(checkpoint.store, 22)
    read: list[int] = []
    was = Log.read

    def counted(log: Log, number: int) -> Any:
        read.append(number)
        return was(log, number)

    monkeypatch.setattr(Log, "read", counted)
    monkeypatch.setattr(overview, "POINTS_MAX", 5)
    found = overview.points(checkpoint.store, Log(checkpoint.store))
    assert [each.epoch for each in found.rolled_back] == [23]
    assert [type(each).__name__ for each in found.records] == ["RestoreReport"]
    assert min(read) == 19, "the one before the five says that it is"


def test_an_epoch_that_was_rolled_back_leaves_the_trail(checkpoint: Checkpoint) -> None:
    trail, log = Trail(), Log(checkpoint.store)
    assert [e.epoch for e in trail.newest(log, 10)] == [3, 2]
    rollback(checkpoint.store, 2)
    assert [e.epoch for e in trail.newest(log, 10)] == [2]


def test_a_trail_remembers_what_the_log_has_retired() -> None:
    checkpoint = Checkpoint({"n": value("bigint")}, keep=2)
    trail = Trail()
    for number in range(30):
        checkpoint.commit({"n": {number: number}})
        checkpoint.collector.after_epoch()
        trail.newest(Log(checkpoint.store), 1)
    assert len(Trail().newest(Log(checkpoint.store), 100)) < 30
    found = [e.epoch for e in trail.newest(Log(checkpoint.store), 100)]
    assert found == list(range(31, 1, -1))


def test_the_parts_of_an_epoch_are_all_of_its_time() -> None:
    timings = Timings(
        run_ms=100, begin_ms=5, process_ms=30, snapshot_ms=10, alignment_ms={"0": 900}
    )
    parts = split_time(timings, 7.0)
    assert sum(ms for _, ms in parts.items()) == pytest.approx(107.0)
    # More than the rest of the epoch it cannot have waited.
    assert (parts.alignment, parts.other, parts.commit) == (55.0, 0.0, 7.0)


def test_an_epoch_has_the_same_parts_told_by_its_run_and_read_from_the_log(
    checkpoint: Checkpoint,
) -> None:
    epoch = Log(checkpoint.store).newest_epoch()
    assert epoch is not None
    epoch = msgspec.structs.replace(epoch, timings=Timings(run_ms=100.0, process_ms=60.0))
    trail = Trail()
    trail.remember([report_of(epoch, 20.0)])
    (told,), read = trail.newest(Log(checkpoint.store), 1), report_of(epoch)
    assert told.epoch_ms == read.epoch_ms == 100.0 and told.rows_per_s == read.rows_per_s
    assert told.parts == read.with_commit(20.0).parts
    assert sum(ms for _, ms in told.parts.items()) == 120.0


def test_the_time_of_a_commit_is_added_to_an_epoch_that_was_seen_before_it(
    checkpoint: Checkpoint,
) -> None:
    trail, log = Trail(), Log(checkpoint.store)
    epoch = log.newest_epoch()
    assert epoch is not None and trail.newest(log, 1)[0].commit_ms is None
    for commit_ms in (None, 20.0, None):
        trail.remember([report_of(epoch, commit_ms)])
    (found,) = trail.newest(log, 1)
    assert (found.commit_ms, found.parts.commit) == (20.0, 20.0)


def test_a_failure_is_one_file_that_counts_its_attempts(checkpoint: Checkpoint) -> None:
    failures = Failures(checkpoint.store, "shop")
    error = FunctionError("process() raised", operator=UID, key="<b>7</b>", row="Row(k=7)")
    for attempt in (1, 2, 3):
        failures.note(error, 4, attempt)
    failures.note_end(error, 4)
    (found,) = ask(checkpoint, "/api/failures")["failures"]
    assert (found["attempts"], found["ended_run"], found["epoch"]) == (3, True, 4)
    assert (found["operator"], found["key"], found["row"]) == (UID, "<b>7</b>", "Row(k=7)")


def test_rows_put_aside_are_shown_with_error_and_row_and_only_with_the_token(
    checkpoint: Checkpoint,
) -> None:
    newest = checkpoint.newest
    assert newest is not None
    sample = LetterSample("ValueError: bad", "7", '{"k": 7}', at="job.py:1 in f")
    measured = msgspec.structs.replace(
        NOTHING_MEASURED, rows_in=9, error_rows=3, error_sample=[sample]
    )
    metrics = Measured(operators={UID: measured})
    checkpoint.log.append(
        lambda number: msgspec.structs.replace(
            newest, number=number, parent=newest.number, metrics=metrics
        )
    )
    (found,) = ask(checkpoint, "/api/failures")["put_aside"]
    assert (found["operator"], found["error_rows"]) == (UID, 3)
    assert found["sample"] == [msgspec.to_builtins(sample)]
    guarded = client(site_of(checkpoint, token=TOKEN))
    assert guarded.get("/api/failures").status_code == 401, "like state"


def test_a_job_says_how_it_goes_the_same_in_words_and_figures(checkpoint: Checkpoint) -> None:
    run = FakeRun(checkpoint)
    for status in ("idle", "behind", "failing"):
        run.status = status
        found = ask(checkpoint, "/api/job", run)
        assert found["status"] == found["health"]["status"] == status
    health = found["health"]
    assert health["rates"]["rows_per_s"] == 0.0, "the last epoch was long ago"
    assert health["lag_ms"] > 10**12 and health["epoch_age_ms"] > 10**12


def test_a_run_shows_where_its_slots_log(checkpoint: Checkpoint) -> None:
    assert ask(checkpoint, "/api/job")["slots"] == []
    assert ask(checkpoint, "/api/job", FakeRun(checkpoint))["slots"] == [
        {"subtask": 0, "executor": "host:1", "log": "/logs/slot-0.log"}
    ]


def test_a_source_shows_the_delay_it_declares_as_a_delay(checkpoint: Checkpoint) -> None:
    write_graph(checkpoint.store, 1, job_graph())
    assert ">watermark delay 5 seconds</text>" in ask(checkpoint, "/api/graph")["drawing"]


def test_the_last_twenty_failures_are_kept(checkpoint: Checkpoint) -> None:
    failures = Failures(checkpoint.store, "shop")
    for epoch in range(1, 26):
        failures.note(FunctionError(f"failed in {epoch}"), epoch, 1)
        failures.settle()
    found = ask(checkpoint, "/api/failures")["failures"]
    assert len(found) == 20 and found[0]["epoch"] == 25


def test_a_store_that_fails_to_note_a_failure_adds_none(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        url = "broken:"

        def put(self, path: str, data: bytes) -> None:
            raise OSError("no space left")

    failures = Failures(Broken(), "shop")  # type: ignore[arg-type]
    failures.note(FunctionError("it failed"), 1, 1)
    failures.note_end(FunctionError("it failed"), 1)
    assert caplog.text.count("could not be written: no space left") == 2


def test_every_page_file_is_served_and_nothing_else(checkpoint: Checkpoint) -> None:
    browser = client(site_of(checkpoint))
    page = browser.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    static = Path(__file__).parents[3] / "src/cairn/web/static"
    for file in static.iterdir():
        found = browser.get(f"/static/{file.name}")
        assert found.status_code == 200 and found.content == file.read_bytes()
        tag = {"If-None-Match": found.headers["etag"]}
        assert browser.get(f"/static/{file.name}", headers=tag).status_code == 304
    for name in ("nothing.js", "..%2fpages.py", "%2e%2e/pages.py", "static/../pages.py", ""):
        assert browser.get(f"/static/{name}").status_code in (400, 404)


def test_pages_name_nothing_outside_and_run_no_inline_script() -> None:
    static = Path(__file__).parents[3] / "src/cairn/web/static"
    for file in static.iterdir():
        text = file.read_text()
        allowed = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in allowed and "https://" not in allowed, file.name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, file.name
        assert "document.write" not in text and "eval(" not in text, file.name
    page = (static / "index.html").read_text()
    assert "style=" not in page and "onclick" not in page and "<style" not in page
