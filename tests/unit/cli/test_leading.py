"""`cairn handover`, against a server whose driver resigns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.group import Group
from cairn.web.server import serve
from tests.unit.cli.command_line import call, json_of
from tests.unit.web.sites import CONTROL, FakeRun, make_checkpoint, site_of

OLD = Member(identity="old", host="ada", pid=1)
NEW = Member(identity="new", host="bob", pid=2, url="http://bob:80")
THIRD = Member(identity="third", host="eve", pid=3)


class Resigning(FakeRun):
    """Passes the lead on, to `next_leader`."""

    next_leader: Member | None = NEW
    url = ""

    def resign(self, to: str | None = None) -> Member:
        chosen = super().resign(to)
        assert self.drivers is not None
        self.status, self.is_waiting = "standby", True
        self.drivers = msgspec.structs.replace(self.drivers, leader=self.next_leader)
        return chosen


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resigning]:
    monkeypatch.setenv("CAIRN_CONTROL_TOKEN", CONTROL)
    monkeypatch.setattr("cairn.web.site.HEALTH_S", 0.0)
    checkpoint = make_checkpoint(tmp_path / "ckpt")
    made = Resigning(checkpoint)
    made.drivers = Group(url="store:", leader=OLD, standbys=[NEW, THIRD], this=OLD)
    with serve(site_of(checkpoint, made, control_token=CONTROL, flight=False)) as served:
        made.url = served.url
        yield made


def test_a_hand_over_ends_with_who_leads(run: Resigning) -> None:
    result = call("handover", run.url, "--to", "bob")
    assert result.exit_code == 0 and "bob, pid 2 leads, after" in result.stdout
    assert run.asked == [("resign", "bob")]


def test_a_third_driver_that_was_faster_is_named(run: Resigning) -> None:
    run.next_leader = THIRD
    found = json_of("handover", run.url)
    assert (found["leader"]["host"], found["successor"]["host"]) == ("eve", "bob")


def test_a_takeover_that_does_not_come_is_an_error(run: Resigning) -> None:
    run.next_leader = None
    result = call("handover", run.url, "--timeout", "0.3")
    assert result.exit_code == 1 and "no driver has taken over: bob" in result.stderr


@pytest.mark.parametrize(
    ("drivers", "to", "says"),
    [
        (Group(url="store:", leader=OLD, standbys=[], this=OLD), None, "none waits"),
        (Group(url="store:", leader=OLD, standbys=[NEW], this=OLD), "ann", "waiting: bob"),
    ],
)
def test_each_reason_against_a_hand_over_is_one_sentence(
    run: Resigning, drivers: Group, to: str | None, says: str
) -> None:
    run.drivers = drivers
    more = [] if to is None else ["--to", to]
    result = call("handover", run.url, *more)
    assert result.exit_code == 1 and says in result.stderr and "next:" in result.stderr


def test_without_the_control_token_nothing_is_asked(
    run: Resigning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAIRN_CONTROL_TOKEN")
    result = call("handover", run.url)
    assert result.exit_code != 0 and "CAIRN_CONTROL_TOKEN" in result.stderr and run.asked == []
