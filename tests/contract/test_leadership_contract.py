"""One suite over the leaderships, with real threads and a real ZooKeeper."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from cairn.driver.coordinator.leadership import Leadership, Member, open_leadership
from cairn.storage.log import Log
from cairn.storage.store import Store, open_store
from tests.zookeeper import ZooKeeper

Open = Callable[[], Leadership]


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeper]:
    server = ZooKeeper()
    yield server
    server.close()


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


@pytest.fixture(params=["store", "zookeeper"])
def open_group(request, store: Store) -> Iterator[Open]:
    if request.param == "store":
        url = "store:?lease=1s"
    else:
        server = request.getfixturevalue("zookeeper")
        url = f"zookeeper://me:secret@{server.hosts}/cairn/{uuid.uuid4().hex}?session=1s"
    opened = []

    def open_one() -> Leadership:
        opened.append(open_leadership(url, store=store))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


class Driver(threading.Thread):
    """Campaigns once, and takes over when it is granted the lead."""

    def __init__(self, group: Leadership, name: str, store: Store) -> None:
        super().__init__(daemon=True)
        self.group, self.identity, self.store = group, name, store
        self.stop, self.leads = threading.Event(), threading.Event()
        self.grant = None
        self.start()

    def run(self) -> None:
        member = Member(identity=self.identity, host="h", pid=1)
        grant = self.group.campaign(member, self.stop)
        if grant is not None:
            taken = Log(self.store).take_over(
                host="h", pid=1, wall_ms=1, only_if_last=grant.only_if_last,
                is_held=lambda: not grant.lost.is_set(),
            )  # fmt: skip
            grant.confirm(taken.term)
            self.grant = grant
            self.leads.set()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_one_leads_the_other_waits_and_the_lead_is_resigned(open_group: Open, store) -> None:
    one = Driver(open_group(), "a", store)
    assert one.leads.wait(30)
    two = Driver(open_group(), "b", store)
    wait_for(lambda: [m.identity for m in one.group.waiting()] == ["b"])
    wait_for(lambda: two.group.leader() is not None)
    assert two.group.leader().identity == "a"
    assert not two.leads.wait(2) and not one.grant.lost.is_set()
    one.grant.resign()
    assert one.grant.lost.is_set() and two.leads.wait(30)
    wait_for(lambda: two.group.leader() is not None)
    assert two.group.leader().identity == "b"


def test_the_lead_is_resigned_to_a_named_member(open_group: Open, store) -> None:
    one = Driver(open_group(), "a", store)
    assert one.leads.wait(30)
    two = Driver(open_group(), "b", store)
    wait_for(lambda: len(one.group.waiting()) == 1)
    three = Driver(open_group(), "c", store)
    wait_for(lambda: len(one.group.waiting()) == 2)
    one.grant.resign(to="c")
    assert three.leads.wait(30) and not two.leads.is_set()
    two.stop.set()
    two.join(30)
    assert not two.is_alive() and two.grant is None


def test_secrets_are_not_shown(open_group: Open) -> None:
    assert "secret" not in open_group().url


def test_a_leader_without_zookeeper_stops_with_its_session_and_leads_again(store) -> None:
    server = ZooKeeper()
    group = open_leadership(f"zookeeper://{server.hosts}/cairn/job?session=1s", store=store)
    try:
        first = Driver(group, "a", store)
        assert first.leads.wait(30)
        server.stop()
        assert first.grant.lost.wait(30)
        second = Driver(group, "b", store)
        server.start()
        assert second.leads.wait(60)
    finally:
        group.close()
        server.close()
