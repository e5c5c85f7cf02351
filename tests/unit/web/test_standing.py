"""A driver that waits: it answers for itself, and sends readers to the leader."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import msgspec
import pytest

import cairn
from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.leadership.in_store import LeaderRecord
from cairn.driver.group import Group
from cairn.errors import EpochError, QueryError
from cairn.report.status import Restart
from cairn.storage.notes import write_group
from cairn.storage.paths import LEADER_PATH
from cairn.web.server import serve
from cairn.web.standing import answer_elsewhere
from tests.unit.snapshots.checkpoints import UID, Checkpoint
from tests.unit.web.sites import CONTROL, TOKEN, FakeRun, client, site_of

THIS = Member(identity="this", host="a", pid=1, url="http://a:80", since_ms=1)
LEADER = Member(identity="leader", host="b", pid=2, url="http://b:80", since_ms=2)
REFUSED = Member(identity="x", host="c", pid=3, refusal="state 'n' does not fit\n  next: no")


def group_of(leader: Member | None = LEADER, *standbys: Member, this: Member = THIS) -> Group:
    return Group(url="store:?lease=10s", leader=leader, standbys=list(standbys), this=this)


def waiting(checkpoint: Checkpoint, group: Group | None) -> FakeRun:
    run = FakeRun(checkpoint)
    run.status, run.is_waiting, run.drivers = "standby", True, group
    return run


def test_readers_are_sent_to_the_same_path_of_the_leader(checkpoint: Checkpoint) -> None:
    asking = client(site_of(checkpoint, waiting(checkpoint, group_of())))
    for path in ("/api/job", "/api/epochs?limit=3", "/api/state/a%2Fb/n?epoch=2", "/nothing"):
        answer = asking.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, f"http://b:80{path}")
        assert answer.json()["error"]["code"] == "standby"
    posted = asking.post("/api/sql", json={"sql": "select 1"})
    assert (posted.status_code, posted.headers["location"]) == (307, "http://b:80/api/sql")
    assert "no-store" in posted.headers["cache-control"]


def test_only_clients_with_access_learn_where_the_leader_is(checkpoint: Checkpoint) -> None:
    site = site_of(checkpoint, waiting(checkpoint, group_of()), token=TOKEN)
    refused = client(site).get("/api/job")
    assert refused.status_code == 401 and "location" not in refused.headers
    assert client(site).get("/api/leader").status_code == 401
    answer = client(site, TOKEN).get("/api/job")
    assert answer.status_code == 307 and TOKEN not in str(answer.headers) + answer.text


def test_a_driver_that_waits_shows_its_own_status_and_who_leads(checkpoint: Checkpoint) -> None:
    run = waiting(checkpoint, group_of(LEADER, THIS, REFUSED))
    asking = client(site_of(checkpoint, run))
    found = asking.get("/api/leader").json()
    assert (found["status"], found["is_leader"], found["live"]) == ("standby", False, True)
    assert found["group"] == msgspec.to_builtins(run.drivers)
    assert (found["restarts"], found["failovers"]) == (3, 1)
    assert found["driver"]["term"] >= 1
    metrics = asking.get("/metrics").text
    assert re.search(r"^cairn_is_leader\{.*\} 0.0$", metrics, re.M)
    assert re.search(r'^cairn_job_status\{.*"standby"\} 1.0$', metrics, re.M)
    assert "cairn_epoch" not in metrics, "those are the leader's"
    assert asking.get("/").status_code == 200 == asking.get("/static/app.js").status_code


def test_a_run_that_leads_answers_everything_itself(checkpoint: Checkpoint) -> None:
    run = FakeRun(checkpoint)
    run.drivers = group_of(THIS)
    asking = client(site_of(checkpoint, run))
    assert asking.get("/api/job").status_code == 200
    assert asking.get("/api/leader").json()["is_leader"] is True


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (None, "No driver leads"),
        (group_of(None), "No driver leads"),
        (group_of(THIS), "No driver leads"),
        (group_of(msgspec.structs.replace(LEADER, url=None)), "serves no HTTP API"),
        (group_of(msgspec.structs.replace(LEADER, url="javascript:alert(1)")), "serves no HTTP"),
        (group_of(msgspec.structs.replace(LEADER, url="http://127.0.0.1:1")), "loopback"),
        (group_of(msgspec.structs.replace(LEADER, url=THIS.url)), "at the address of this"),
    ],
)
def test_without_a_leader_to_reach_readers_are_asked_to_come_again(
    checkpoint: Checkpoint, group: Group | None, says: str
) -> None:
    answer = client(site_of(checkpoint, waiting(checkpoint, group))).get("/api/job")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    error = answer.json()["error"]
    assert error["code"] == "no-leader" and says in error["message"] and error["next"]


def test_a_loopback_address_is_good_enough_on_the_same_machine() -> None:
    near = msgspec.structs.replace(LEADER, host=THIS.host, url="http://127.0.0.1:1")
    assert answer_elsewhere(group_of(near), "/api/job?a=1").headers["location"] == (
        "http://127.0.0.1:1/api/job?a=1"
    )


def test_a_group_in_the_checkpoint_is_shown_without_its_run(checkpoint: Checkpoint) -> None:
    def read() -> Any:
        return client(site_of(checkpoint)).get("/api/leader").json()

    found = read()
    assert (found["group"], found["group_url"], found["live"]) == (None, None, False)
    url = "store:?lease=10s"
    record = LeaderRecord(term=1, counter=1, member=LEADER)
    checkpoint.store.put(LEADER_PATH, msgspec.json.encode(record))
    write_group(checkpoint.store, 1, url)
    found = read()
    assert (found["group"]["leader"]["host"], found["group_url"]) == ("b", url)
    for elsewhere in ("zookeeper://zk:2181/fraud", "store:?of=later"):
        write_group(checkpoint.store, 2, elsewhere)
        found = read()
        assert (found["group"], found["group_url"]) == (None, elsewhere)


# Hand-over


def test_a_hand_over_names_the_successor_and_each_reason_against_one(
    checkpoint: Checkpoint,
) -> None:
    run = FakeRun(checkpoint)
    asking = client(site_of(checkpoint, run, control_token=CONTROL), CONTROL)
    path = "/api/control/handover"

    def refusal(body: Any = None) -> str:
        answer = asking.post(path, json=body or {})
        assert answer.status_code == 409
        message: str = answer.json()["error"]["message"]
        return message

    run.drivers = group_of(THIS)
    assert "none waits" in refusal()
    run.drivers = group_of(THIS, REFUSED)
    assert "c would be refused: state 'n' does not fit" in refusal()
    run.drivers = group_of(THIS, REFUSED, LEADER)
    assert "'d': waiting: b, c" in refusal({"to": "d"})
    answer = asking.post(path, json={"to": "b"})
    assert answer.status_code == 202 and answer.json()["successor"]["identity"] == "leader"
    assert run.asked[-1] == ("resign", "b")


def test_a_hand_over_needs_the_control_token(checkpoint: Checkpoint) -> None:
    run = FakeRun(checkpoint)
    asking = client(site_of(checkpoint, run, token=TOKEN, control_token=CONTROL), TOKEN)
    assert asking.post("/api/control/handover", json={}).status_code == 401
    assert run.asked == []


# The client of a group


class Pair:
    """Two drivers, each with its server; the first leads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.runs = [FakeRun(checkpoint), FakeRun(checkpoint)]
        self.sites = [
            site_of(checkpoint, run, token=TOKEN, control_token=CONTROL, flight=False)
            for run in self.runs
        ]
        self.served = [serve(site) for site in self.sites]
        self.lead(0)

    @property
    def urls(self) -> list[str]:
        return [served.url for served in self.served]

    def lead(self, at: int | None, *, url: str | None = None) -> None:
        """Driver `at` leads; None for nobody."""
        members = [Member(identity=str(n), host="h", pid=n, url=u) for n, u in enumerate(self.urls)]
        leader = None if at is None else members[at]
        if leader is not None and url is not None:
            leader = msgspec.structs.replace(leader, url=url)
        for n, run in enumerate(self.runs):
            run.is_waiting = n != at
            run.status = "running" if n == at else "standby"
            run.drivers = group_of(leader, this=members[n])
            self.sites[n]._group = (None, float("-inf"))


@pytest.fixture
def pair(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr("cairn.web.site.HEALTH_S", 0.0)
    made = Pair(checkpoint)
    yield made
    for served in made.served:
        served.close()


def test_a_client_follows_the_leader(pair: Pair) -> None:
    with cairn.client(pair.urls, TOKEN, control_token=CONTROL) as job:
        assert job.query(UID, "n", 5).value == 50 and job.url == pair.urls[0]
        pair.lead(1)
        assert job.query(UID, "n", 5).value == 50 and job.url == pair.urls[1]
        pair.lead(0)
        job.rescale(5)
        assert pair.runs[0].asked == [("rescale", 5)] and pair.runs[1].asked == []


def test_a_client_goes_on_with_another_driver_when_one_is_gone(pair: Pair) -> None:
    with cairn.client(pair.urls, TOKEN, control_token=CONTROL) as job:
        assert job.job()["status"] == "running"
        pair.lead(1)
        pair.served[0].close()
        assert job.query(UID, "n", 5).value == 50 and job.url == pair.urls[1]
        job._link._at = 0
        job.rescale(3)
        assert pair.runs[1].asked == [("rescale", 3)]


def test_reads_wait_for_a_fail_over_up_to_their_limit(pair: Pair) -> None:
    pair.lead(None)
    with cairn.client(pair.urls, TOKEN, failover_timeout=0.3) as job:
        with pytest.raises(QueryError, match="no driver of the job leads"):
            job.job()
        assert job.leader()["status"] == "standby", "each driver answers for itself"
    with cairn.client(pair.urls, TOKEN, failover_timeout=60.0) as job:
        later = threading.Timer(0.3, pair.lead, [1])
        later.start()
        assert job.query(UID, "n", 5).value == 50
        later.join()


def test_a_leader_under_another_name_is_found_among_the_addresses(pair: Pair) -> None:
    pair.lead(1, url="http://its-other-name:8080")
    with cairn.client(pair.urls, TOKEN) as job:
        assert job.query(UID, "n", 5).value == 50 and job.url == pair.urls[1]


class Thief(BaseHTTPRequestHandler):
    heard: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.heard.append(str(self.headers))
        self.send_error(404)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None: ...


def test_a_token_is_never_sent_to_an_address_that_was_not_given(pair: Pair) -> None:
    Thief.heard.clear()
    with HTTPServer(("127.0.0.1", 0), Thief) as thief:
        threading.Thread(target=thief.serve_forever, daemon=True).start()
        pair.lead(1, url=f"http://127.0.0.1:{thief.server_port}")
        with cairn.client(pair.urls[0], TOKEN, control_token=CONTROL) as job:
            with pytest.raises(QueryError, match="which this client was not given"):
                job.job()
            with pytest.raises(QueryError, match="which this client was not given"):
                job.rescale(3)
        thief.shutdown()
    assert Thief.heard == []


def test_a_change_that_no_driver_accepts_is_not_repeated(pair: Pair) -> None:
    pair.runs[0].drivers = group_of(None)
    with (
        cairn.client(pair.urls, TOKEN, control_token=CONTROL) as job,
        pytest.raises(EpochError, match="none waits"),
    ):
        job.handover()
    assert pair.runs[0].asked == [("resign", None)] and pair.runs[1].asked == []


def test_restarts_are_in_the_overview_while_the_run_pauses(checkpoint: Checkpoint) -> None:
    run = FakeRun(checkpoint)
    run.status = "restarting"
    run.restarted = [
        Restart(
            number=2, wall_ms=5, pause_ms=4000, kind="OSError", cause="away", host="a", pid=1
        )
    ]  # fmt: skip
    asking = client(site_of(checkpoint, run))
    health = asking.get("/api/job").json()["health"]
    assert (health["status"], health["restart"]["cause"]) == ("restarting", "away")
    assert asking.get("/api/failures").json()["restarts"] == []
