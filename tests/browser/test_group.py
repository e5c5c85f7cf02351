"""The drivers of a group in a real browser, without Spark: the leader's pages, a standby's page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.group import Group
from cairn.errors import FunctionError
from cairn.report.status import Restart
from cairn.storage.failures import Failures
from cairn.storage.notes import write_graph, write_restart
from cairn.web.server import serve
from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.web.sites import CONTROL, FakeRun, make_checkpoint, site_of
from tests.unit.web.test_overview import job_graph

HOSTILE = '<img src=x onerror="window.hacked=1">'
NOW_MS = time.time_ns() // 1_000_000
LEADER = Member(
    identity="l", host="ada", pid=4711, url="http://ada:8080", since_ms=NOW_MS - 7_200_000
)
HOT = Member(
    identity="h", host="bob", pid=42, url="http://bob:8080", since_ms=NOW_MS - 3_600_000,
    standby="hot", epoch=3,
)  # fmt: skip
REFUSED = Member(
    identity="r", host="eve", pid=99, since_ms=NOW_MS - 60_000,
    refusal="operator 'count', state 'n': the epoch holds bigint, the job declares string\n"
    f"  next: {HOSTILE}",
)  # fmt: skip
DRIVERS = Group(
    url="zookeeper://zk1:2181,zk2:2181,zk3:2181/fraud?session=10s",
    leader=LEADER,
    standbys=[HOT, REFUSED],
    this=LEADER,
)

OpenPage = Callable[..., Any]


def restart(number: int, pause_ms: int, *, ago_ms: int = 0) -> Restart:
    cause = "process() of operator 'count' raised ConnectionError: refused"
    return Restart(
        number=number, wall_ms=NOW_MS - ago_ms, pause_ms=pause_ms, kind="FunctionError",
        cause=cause, host="ada", pid=4711,
    )  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    made = make_checkpoint(tmp_path / "ckpt")
    write_graph(made.store, 1, job_graph(job="shop"))
    return made


class Served(FakeRun):
    url = ""

    def see(self, drivers: Group, status: str, *, is_waiting: bool) -> None:
        self.drivers, self.status, self.is_waiting = drivers, status, is_waiting

    def resign(self, to: str | None = None) -> Member:
        chosen = super().resign(to)
        assert self.drivers is not None
        after = msgspec.structs.replace(self.drivers, leader=chosen, standbys=[REFUSED])
        self.see(after, "standby", is_waiting=True)
        return chosen


@pytest.fixture
def run(checkpoint: Checkpoint) -> Iterator[Served]:
    made = Served(checkpoint)
    made.drivers = DRIVERS
    with serve(site_of(checkpoint, made, control_token=CONTROL, flight=False)) as served:
        made.url = served.url
        yield made


def waits(this: Member, *, leader: Member | None = LEADER) -> Group:
    return msgspec.structs.replace(DRIVERS, leader=leader, this=this)


@pytest.mark.parametrize("width", [390, 1440])
def test_the_overview_shows_who_leads_who_waits_and_what_would_refuse_them(
    run: Served, open_page: OpenPage, width: int
) -> None:
    page = open_page(run.url, width=width)
    drivers = page.locator(".drivers")
    drivers.get_by_text("leads").wait_for()
    text = drivers.inner_text()
    for said in ("ada, pid 4711 (this one)", "bob, pid 42", "hot", "no: operator 'count'"):
        assert said in text
    assert drivers.get_by_role("link", name="bob:8080").get_attribute("href") == HOT.url
    drivers.locator("summary").click()
    assert HOSTILE in drivers.locator("pre").inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_driver_that_waits_has_a_page_of_its_own_and_names_the_leader(
    run: Served, open_page: OpenPage
) -> None:
    run.see(waits(REFUSED), "standby", is_waiting=True)
    page = open_page(run.url)
    page.get_by_role("heading", name="Another driver leads the job").wait_for()
    assert page.locator("#status").inner_text() == "standby"
    assert page.get_by_role("link", name="ada:8080").first.get_attribute("href") == LEADER.url
    assert page.locator(".now-failed .refused").is_visible(), "what would refuse this one"
    assert page.locator(".tab").count() == 0, "the other pages are the leader's"


def test_pages_that_are_open_follow_a_lead_that_is_lost_and_comes_back(
    run: Served, open_page: OpenPage
) -> None:
    page = open_page(run.url)
    page.locator(".pulse.is-live").wait_for()
    run.see(waits(HOT, leader=None), "standby", is_waiting=True)
    page.get_by_role("heading", name="Nobody leads the job").wait_for()
    page.get_by_text("Nobody is known to lead the job.").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(run.url)))
    with page.expect_request("**/api/leader"):
        pass
    assert set(asked) == {"/api/leader"}, "nobody would answer anything else"
    run.see(DRIVERS, "running", is_waiting=False)
    page.locator(".tiles").wait_for()
    page.locator(".pulse.is-live").wait_for()
    # What is under way when the lead is lost is refused, and the browser notes it.
    page.complaints[:] = [each for each in page.complaints if "503" not in each]


def test_the_lead_is_handed_over_from_the_control_page(run: Served, open_page: OpenPage) -> None:
    page = open_page(run.url)
    page.goto(f"{run.url}/#/control")
    page.get_by_label("Control token").fill(CONTROL)
    choice = page.get_by_label("Standby")
    assert choice.locator("option[disabled]").inner_text().endswith("would be refused")
    choice.select_option("h")
    page.get_by_role("button", name="Hand over").first.click()
    page.locator("dialog").get_by_role("button", name="Hand over").click()
    page.get_by_role("heading", name="Another driver leads the job").wait_for()
    assert run.asked == [("resign", "h")]


def test_a_run_that_restarts_shows_attempts_pause_and_cause(
    run: Served, checkpoint: Checkpoint, open_page: OpenPage
) -> None:
    run.status = "restarting"
    run.restarted = [restart(1, 1000, ago_ms=5000), restart(2, 2000)]
    for each in run.restarted:
        write_restart(checkpoint.store, each)
    error = FunctionError(run.restarted[0].cause, operator="count", row="Row(k=1)")
    Failures(checkpoint.store, "shop").note_end(error, 4)
    page = open_page(run.url)
    failed = page.locator(".now-failed")
    failed.get_by_text("begins again").wait_for()
    assert "2, after a pause of 2.0 s" in failed.inner_text()
    assert page.locator("#status").inner_text() == "restarting"
    page.goto(f"{run.url}/#/errors")
    rows = page.get_by_role("region", name="Restarts, newest first").locator("tbody tr")
    rows.first.wait_for()
    assert [row.split("\t")[1:3] for row in rows.all_inner_texts()] == [
        ["2", "2.0 s"],
        ["1", "1.0 s"],
    ]
