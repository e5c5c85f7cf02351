"""State over HTTP: look-ups, scans and differences, without Spark and without a socket."""

from __future__ import annotations

import datetime as dt
import http.client
import json
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from cairn.web.server import serve
from cairn.web.states import LOOK_UPS_MAX
from tests.marks import for_soak
from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.web.sites import FakeRun, client, content, site_of

N = "/api/state/count/n"


def test_states_are_listed_with_their_columns_and_types(checkpoint: Checkpoint) -> None:
    answer = client(site_of(checkpoint)).get("/api/state").json()
    assert answer["epoch"] == 3 and answer["job"] == "shop"
    states = {each["state"]: each for each in answer["states"]}
    assert list(states) == ["n", "items", "last", "at", "raw"]
    assert states["last"]["kind"] == "map"
    assert states["last"]["columns"] == [
        {"name": "key_group", "type": "int"},
        {"name": "k", "type": "bigint"},
        {"name": "entry", "type": "string"},
        {"name": "value", "type": "double"},
    ]


@pytest.mark.parametrize("limit", [1, 3, 7, 1000])
def test_pages_of_a_scan_give_every_row_once_and_of_one_epoch(
    checkpoint: Checkpoint, limit: int
) -> None:
    asking = client(site_of(checkpoint))
    found: dict[int, Any] = {}
    after: str | None = None
    for _ in range(100):
        params = {"limit": limit} | ({"after": after} if after else {})
        answer = asking.get(N, params=params).json()
        if after is None:
            # The job goes on: what comes now belongs to another epoch.
            checkpoint.commit({"n": dict.fromkeys(range(200), -1)})
        assert answer["epoch"] == 3
        for row in answer["rows"]:
            assert row["k"] not in found
            found[row["k"]] = row["value"]
        after = answer["after"]
        if after is None:
            break
    # An integer that a browser would round is text.
    expected = {k: k * 10 for k in range(2, 40)} | {0: str(2**60), 100: 1000}
    assert found == expected


def test_cursor_of_a_removed_epoch_is_gone_not_mixed_with_another(folder: Path) -> None:
    checkpoint = Checkpoint({"n": _bigint()}, keep=1)
    checkpoint.commit({"n": dict.fromkeys(range(20), 1)})
    asking = client(site_of(checkpoint))
    after = asking.get(N, params={"limit": 2}).json()["after"]
    while checkpoint.log.oldest_kept() <= 2:
        checkpoint.commit({"n": dict.fromkeys(range(20), 2)}, base=True)
        checkpoint.collector.after_epoch()
    answer = asking.get(N, params={"limit": 2, "after": after})
    assert answer.status_code == 410
    assert answer.json()["error"]["code"] == "gone"


def _bigint() -> Any:
    from tests.unit.snapshots.checkpoints import value

    return value("bigint")


@pytest.mark.parametrize(
    ("path", "found", "value", "type"),
    [
        ("count/n/5", True, 50, "bigint"),
        ("count/n/0", True, str(2**60), "bigint"),
        ("count/n/1", False, None, "bigint"),
        ("count/n/[5]", True, 50, "bigint"),
        ("count/items/1", True, ["a", "b"], "array<string>"),
        ("count/last/1", True, [["x", 0.5], ["y", "NaN"]], "map<string,double>"),
        ("count/raw/1", True, "AP8=", "binary"),
    ],
)
def test_look_up_without_a_run_reads_the_checkpoint(
    checkpoint: Checkpoint, path: str, found: bool, value: Any, type: str
) -> None:
    answer = client(site_of(checkpoint)).get(f"/api/state/{path}").json()
    assert (answer["found"], answer["value"]) == (found, value)
    assert (answer["type"], answer["epoch"], answer["source"]) == (type, 3, "checkpoint")


def test_look_up_of_an_epoch_reads_that_one_though_a_run_is_here(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint, FakeRun(checkpoint)))
    live = asking.get(f"{N}/1").json()
    assert (live["found"], live["epoch"], live["source"]) == (False, 3, "slot")
    before = asking.get(f"{N}/1", params={"epoch": 2}).json()
    assert (before["value"], before["epoch"], before["source"]) == (10, 2, "checkpoint")


def test_answers_of_a_run_carry_the_epoch_they_are_of_as_it_moves_on(
    checkpoint: Checkpoint,
) -> None:
    asking = client(site_of(checkpoint, FakeRun(checkpoint)))
    for epoch in range(4, 8):
        checkpoint.commit({"n": {5: epoch}})
        answer = asking.get(f"{N}/5").json()
        assert (answer["value"], answer["epoch"], answer["type"]) == (epoch, epoch, "bigint")


def test_before_the_first_epoch_of_a_run_the_checkpoint_answers(checkpoint: Checkpoint) -> None:
    run = FakeRun(checkpoint)
    run.has_epoch = False
    answer = client(site_of(checkpoint, run)).get(f"{N}/5").json()
    assert (answer["value"], answer["source"]) == (50, "checkpoint")


@pytest.mark.parametrize("live", [True, False])
def test_many_keys_are_answered_in_their_order(checkpoint: Checkpoint, live: bool) -> None:
    asking = client(site_of(checkpoint, FakeRun(checkpoint) if live else None))
    answer = asking.post(f"{N}/lookup", json={"keys": [7, 1, [3], 7, "4"]}).json()
    assert answer["epoch"] == 3
    assert [(a["key"], a["found"], a["value"]) for a in answer["answers"]] == [
        ([7], True, 70),
        ([1], False, None),
        ([3], True, 30),
        ([7], True, 70),
        ([4], True, 40),
    ]


def test_difference_of_two_epochs_has_exact_counts_beyond_its_limit(
    checkpoint: Checkpoint,
) -> None:
    asking = client(site_of(checkpoint))
    whole = asking.get("/api/diff/count/n", params={"from": 2, "to": 3}).json()
    assert (whole["added"], whole["changed"], whole["removed"]) == (1, 1, 1)
    assert whole["truncated"] is False
    assert {(r["change"], r["key"][0], r["before"], r["after"]) for r in whole["rows"]} == {
        ("added", 100, None, 1000),
        ("changed", 0, 0, str(2**60)),
        ("removed", 1, 10, None),
    }
    part = asking.get("/api/diff/count/n", params={"from": 2, "to": 3, "limit": 1}).json()
    assert len(part["rows"]) == 1 and part["truncated"] is True and part["removed"] == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/state/count/nothing", 404),
        ("/api/state/nobody/n", 404),
        ("/api/state/count/n?limit=0", 400),
        ("/api/state/count/n?limit=1001", 400),
        ("/api/state/count/n?limit=x", 400),
        ("/api/state/count/n?limit=1&limit=2", 400),
        ("/api/state/count/n?after=nonsense", 400),
        ("/api/state/count/n?after=kwECAw", 410),
        ("/api/state/count/n?epoch=99", 410),
        ("/api/state/count/n?epoch=1", 410),
        ("/api/state/count/n?epoch=-1", 400),
        ("/api/state/count/n/word", 400),
        ("/api/state/count/n/[1,2]", 400),
        ("/api/diff/count/n", 400),
        ("/api/diff/count/n?from=2&to=99", 410),
        ("/api/diff/count/nothing?from=2&to=3", 404),
    ],
)
def test_what_does_not_fit_is_one_error_shape(
    checkpoint: Checkpoint, path: str, status: int
) -> None:
    answer = client(site_of(checkpoint)).get(path)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "next"} and error["message"] and error["next"]


def test_page_of_another_epoch_than_its_cursor_is_refused(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint))
    after = asking.get(N, params={"limit": 2}).json()["after"]
    assert asking.get(N, params={"after": after, "epoch": 2}).status_code == 400
    assert asking.get(N, params={"after": after, "epoch": 3}).status_code == 200


def test_large_reads_at_once_are_bounded_and_come_back(checkpoint: Checkpoint) -> None:
    from cairn.web.site import HEAVY_READS_MAX

    site = site_of(checkpoint)
    reads = [site.heavy() for _ in range(HEAVY_READS_MAX)]
    for read in reads:
        read.__enter__()
    refused = client(site).get(N)
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
    assert client(site).get(f"{N}/5").status_code == 200, "a look-up is no large read"
    for read in reads:
        read.__exit__(None, None, None)
    assert client(site).get(N).status_code == 200


def test_sql_reads_the_states_of_an_epoch_and_says_when_there_is_more(
    checkpoint: Checkpoint, folder: Path
) -> None:
    asking = client(site_of(checkpoint))
    before = content(folder)
    sql = 'select k, value as k, value from "count.n" where k < 3 order by value'
    answer = asking.post("/api/sql", json={"sql": sql, "limit": 1}).json()
    assert answer["columns"] == [
        {"name": "k", "type": "bigint"},
        {"name": "k_1", "type": "bigint"},
        {"name": "value", "type": "bigint"},
    ], "no two columns have one name"
    assert (answer["rows"], answer["truncated"], answer["epoch"]) == ([[2, 20, 20]], True, 3)
    older = asking.post("/api/sql", json={"sql": "select count(*) from n", "epoch": 2}).json()
    assert (older["rows"], older["truncated"]) == ([[40]], False)
    assert content(folder) == before


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/passwd')",
        for_soak("select * from '/etc/passwd'"),
        "copy n to '/tmp/cairn-never'",
        for_soak("attach '/tmp/cairn-never' as x"),
        for_soak("install httpfs"),
        for_soak("set memory_limit = '1TB'"),
        "select 1; select 2",
        for_soak("select getenv('HOME')"),
        for_soak("select * from nothing"),
        for_soak("nonsense"),
        " ",
        for_soak("select " + "(" * 5000),
        for_soak("with a as (" * 9),
    ],
)
def test_sql_that_does_not_read_state_is_400(checkpoint: Checkpoint, sql: str) -> None:
    answer = client(site_of(checkpoint)).post("/api/sql", json={"sql": sql})
    assert answer.status_code == 400, answer.text
    assert "root:" not in answer.text and "Traceback" not in answer.text


def test_sql_shows_times_that_python_has_no_years_for(checkpoint: Checkpoint) -> None:
    sql = "select timestamp '290000-01-01' a, '-infinity'::date b, [timestamp '290000-01-01'] c"
    answer = client(site_of(checkpoint)).post("/api/sql", json={"sql": sql})
    assert answer.status_code == 200, answer.text
    ((time, date, times),) = answer.json()["rows"]
    assert isinstance(time, str) and isinstance(date, str) and times == [time]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("type", "key"),
    [
        ("string", "ä/\x00?\U0001f4a3"),
        ("binary", b"\xff\x00"),
        ("decimal(10,2)", Decimal("1.50")),
        ("double", float("nan")),
        ("date", dt.date(2024, 2, 29)),
        ("boolean", True),
        ("timestamp", dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.UTC)),
        ("bigint", 2**62),
    ],
)
def test_a_key_of_any_type_is_found_as_a_scan_shows_it(type: str, key: Any, several: bool) -> None:
    types = {"k": type, "other": "string"} if several else {"k": type}
    checkpoint = Checkpoint({"n": _bigint()}, types)
    checkpoint.commit({"n": {(key, "z") if several else key: 7}})
    asking = client(site_of(checkpoint))
    (row,) = asking.get(N).json()["rows"]
    shown = [row[name] for name in types]
    (answer,) = asking.post(f"{N}/lookup", json={"keys": [shown]}).json()["answers"]
    assert (answer["found"], answer["value"], answer["key"]) == (True, 7, shown)
    by_path = asking.get(f"{N}/{quote(json.dumps(shown), safe='')}").json()
    assert (by_path["found"], by_path["value"]) == (True, 7)


@pytest.mark.parametrize("type", ["string", "binary", "decimal(10,2)", "double", "date", "bigint"])
def test_a_key_that_fits_no_type_is_400_or_not_found(type: str) -> None:
    checkpoint = Checkpoint({"n": _bigint()}, {"k": type})
    checkpoint.commit({"n": {}})
    asking = client(site_of(checkpoint))
    odd = [True, 1.5, 2**70, "", "\x00", "\ud800", "1e999999", "9" * 5000, "[1", [], [[1]], {}]
    for key in odd:
        body = json.dumps({"keys": [key]}).encode()
        answer = asking.post(
            f"{N}/lookup", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (200, 400), (key, answer.text)


def test_a_difference_that_takes_too_long_ends(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = client(site_of(checkpoint))
    path = "/api/diff/count/n?from=2&to=3"
    monkeypatch.setattr("cairn.web.states.DIFF_S", -1.0)
    answer = asking.get(path)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "too-large"
    monkeypatch.setattr("cairn.web.states.DIFF_S", 60.0)
    assert asking.get(path).status_code == 200


def test_one_difference_is_made_at_a_time(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = client(site_of(checkpoint))
    path = "/api/diff/count/n?from=2&to=3"
    found: list[int] = []

    def and_another(*args: Any, **settings: Any) -> list[Any]:
        if not found:
            found.append(asking.get(path).status_code)
        return []

    monkeypatch.setattr("cairn.web.states.diff_epochs", and_another)
    assert asking.get(path).status_code == 200
    assert found == [429]


def test_while_slots_do_not_answer_all_but_look_ups_is_served(checkpoint: Checkpoint) -> None:
    run, answers = FakeRun(checkpoint), threading.Event()
    was = run.query_many

    def slow(*args: Any) -> Any:
        answers.wait(20)
        return was(*args)

    run.query_many = slow  # type: ignore[method-assign]
    with serve(site_of(checkpoint, run, flight=False)) as served:

        def ask(path: str) -> int:
            asking = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
            try:
                asking.request("GET", path)
                return asking.getresponse().status
            finally:
                asking.close()

        with ThreadPoolExecutor(60) as threads:
            try:
                asked = [threads.submit(ask, f"{N}/5") for _ in range(60)]
                # Those beyond what may wait are told at once; the others are still there.
                done, waiting = wait(asked, return_when=FIRST_COMPLETED)
                assert {each.result() for each in done} == {429} and waiting
                for path in ("/static/app.js", "/login", "/metrics", "/api/job", N):
                    assert ask(path) == 200
            finally:
                answers.set()
            statuses = [each.result() for each in asked]
    assert statuses.count(200) == 2 * LOOK_UPS_MAX and statuses.count(429) == 12
