"""One suite over the leaderships, with real threads, processes, a real ZooKeeper and the real log.

Kubernetes is a fake of its API in this process (`tests/kubernetes_api.py`).
"""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cairn.driver.coordinator.leadership import open_leadership
from cairn.errors import CommitConflictError
from cairn.storage.log import Log
from cairn.storage.manifest import Takeover
from cairn.storage.store import Store, open_store
from tests.contract.leaderships import (
    Driver,
    InKubernetes,
    InStore,
    InZooKeeper,
    Link,
    Place,
    everywhere,
    wait_for,
)
from tests.led_log import append_epoch, check_log
from tests.marks import for_soak
from tests.zookeeper import Ensemble, ZooKeeper


@pytest.fixture(scope="module", autouse=True)
def no_client_outlives_its_group() -> Iterator[None]:
    """One that tried to connect for ever would slow down all later tests."""
    before = set(threading.enumerate())
    yield
    wait_for(
        lambda: not [t for t in threading.enumerate() if "zk_loop" in t.name and t not in before]
    )


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeper]:
    server = ZooKeeper()
    yield server
    server.close()


@pytest.fixture
def places(zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[list[Place]]:
    """The three leaderships, each with a checkpoint of its own."""
    made: list[Place] = [
        InStore(tmp_path / "store"),
        InZooKeeper(tmp_path / "zookeeper", zookeeper),
        InKubernetes(tmp_path / "kubernetes"),
    ]
    yield made
    for place in made:
        place.mend()
    Driver.end_all()
    for place in made:
        place.close()
        check_log(place.store, type(place).__name__)


@pytest.fixture
def store() -> Iterator[Store]:
    yield open_store("memory:")
    Driver.end_all()


def lead(link: Link, identity: str, store: Store) -> Driver:
    driver = Driver(link.group, identity, store)
    assert driver.leads.wait(30)
    return driver


def identities(link: Link) -> list[str]:
    return [member.identity for member in link.group.waiting()]


def leader(link: Link) -> str | None:
    found = link.group.leader()
    return None if found is None else found.identity


def test_one_leads_the_others_wait_and_the_lead_is_resigned(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        first, second = place.open(2), place.open(2)
        one = lead(first, "a", store)
        two = Driver(second.group, "b", store)
        wait_for(lambda: identities(first) == ["b"] and leader(second) == "a")
        assert not two.leads.wait(2.5) and not one.grant.lost.is_set()
        one.grant.resign()
        one.grant.resign(to="nobody")
        assert one.grant.lost.is_set() and two.leads.wait(30)
        wait_for(lambda: leader(first) == "b" and identities(first) == [])

    everywhere(places, story)


def test_the_lead_is_resigned_to_a_chosen_member(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        ways = [place.open() for _ in range(3)]
        one = lead(ways[0], "a", store)
        two = Driver(ways[1].group, "b", store)
        wait_for(lambda: identities(ways[0]) == ["b"])
        three = Driver(ways[2].group, "c/x", store)
        wait_for(lambda: sorted(identities(ways[0])) == ["b", "c/x"])
        one.grant.resign(to="c/x")
        assert three.leads.wait(30) and not two.leads.is_set()
        two.stop.set()
        two.join(30)
        assert not two.is_alive() and two.grant is None
        wait_for(lambda: identities(ways[0]) == [])

    everywhere(places, story)


def test_others_lead_if_the_chosen_member_is_gone(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        first, second = place.open(), place.open()
        one = lead(first, "a", store)
        two = Driver(second.group, "b", store)
        wait_for(lambda: identities(first) == ["b"])
        one.grant.resign(to="gone")
        assert two.leads.wait(30)

    everywhere(places, story)


def test_members_see_the_facts_of_each_other_and_their_changes(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        first, second = place.open(), place.open()
        one = Driver(first.group, "a", store, url="http://a:1")
        assert one.leads.wait(30)
        two = Driver(second.group, "b", store, standby="hot", refusal="state 'n' has another type")
        wait_for(lambda: identities(first) == ["b"])
        assert first.group.waiting() == [two.member]
        changed = msgspec.structs.replace(two.member, refusal=None, epoch=7)
        second.group.update(changed)
        wait_for(lambda: first.group.waiting() == [changed])
        first.group.update(msgspec.structs.replace(one.member, url="http://a:2"))
        wait_for(lambda: getattr(second.group.leader(), "url", None) == "http://a:2")

    everywhere(places, story)


def test_a_member_that_closes_is_seen_no_more_and_the_lead_passes_on(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        first, second, third = place.open(), place.open(), place.open()
        lead(first, "a", store)
        two = Driver(second.group, "b", store)
        wait_for(lambda: identities(third) == ["b"])
        first.group.close()
        assert two.leads.wait(30)
        wait_for(lambda: leader(third) == "b")
        second.group.close()
        wait_for(lambda: leader(third) is None and identities(third) == [])

    everywhere(places, story)


def test_a_leader_that_loses_its_connection_stops_and_comes_back_as_a_standby(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        first, second = place.open(2), place.open(2)
        one = lead(first, "a", store)
        two = Driver(second.group, "b", store)
        wait_for(lambda: identities(second) == ["b"])
        first.cut()
        assert two.leads.wait(30)
        assert one.grant.lost.wait(30)
        with pytest.raises(CommitConflictError):
            append_epoch(one.log, one.term)
        first.mend()
        again = Driver(first.group, "a", store)
        wait_for(lambda: identities(second) == ["a"])
        assert not again.leads.is_set() and not two.grant.lost.is_set()

    everywhere(places, story)


def test_a_short_loss_of_the_connection_and_slow_renewals_keep_the_lead(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        first, second = place.open(4), place.open(4)
        one = lead(first, "a", store)
        two = Driver(second.group, "b", store)
        wait_for(lambda: identities(second) == ["b"])
        first.cut()
        time.sleep(0.5)
        first.mend()
        first.slow_down(0.2)
        assert not one.grant.lost.wait(5) and not two.leads.is_set()

    everywhere(places, story)


def test_a_standby_without_a_connection_goes_on_waiting(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        first, second = place.open(2), place.open(2)
        one = lead(first, "a", store)
        two = Driver(second.group, "b", store)
        wait_for(lambda: identities(first) == ["b"])
        second.cut()
        assert not two.leads.wait(3) and two.is_alive() and not one.grant.lost.is_set()
        second.mend()
        one.grant.resign()
        assert two.leads.wait(30)

    everywhere(places, story)


def test_renewals_that_take_longer_than_the_lease_lose_the_lead(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        first, second = place.open(), place.open()
        one = lead(first, "a", store)
        two = Driver(second.group, "b", store)
        wait_for(lambda: identities(second) == ["b"])
        first.slow_down(1.5)
        assert one.grant.lost.wait(30) and two.leads.wait(30)

    everywhere(places, story)


def test_a_process_that_was_paused_for_longer_than_its_lease_publishes_nothing(places) -> None:
    def story(place: Place) -> None:
        store = place.store
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.led_log", place.url(2), store.url, "a"],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": _python_path()},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            term = int(process.stdout.readline().removeprefix("leads "))
            assert process.stdout.readline().startswith("epoch ")
            process.send_signal(signal.SIGSTOP)
            two = lead(place.open(), "b", store)
            wait_for(lambda: two.published > 0)
            process.send_signal(signal.SIGCONT)
            rest = process.stdout.read().split("\n")
            assert rest[-3:] in (["lost", "refused", ""], ["fenced", "refused", ""])
            # Epochs that were published before the pause may have been printed after it.
            terms = [record.term for record in Log(store).records()]
            assert set(terms[: terms.index(two.term)]) == {term}
            assert set(terms[terms.index(two.term) :]) == {two.term}
            assert not two.grant.lost.is_set()
        finally:
            process.kill()
            process.wait()

    everywhere(places, story)


@pytest.mark.parametrize(("seed", "seconds"), [(1, 4), for_soak(2, 60), for_soak(3, 60)])
def test_at_most_one_term_publishes_while_connections_fail(places, seed, seconds) -> None:
    def story(place: Place) -> None:
        store = place.store
        chance = random.Random(seed)
        ways = [place.open() for _ in range(3)]
        drivers = [
            Driver(way.group, f"d{number}", store, repeats=True) for number, way in enumerate(ways)
        ]
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            leading = [
                way for way, driver in zip(ways, drivers, strict=True) if driver.leads.is_set()
            ]
            way = chance.choice(leading or ways)
            way.cut() if chance.random() < 0.7 else way.slow_down(0.4)
            time.sleep(chance.uniform(0.2, 2))
            way.mend()
        records = check_log(store, f"seed {seed}")
        done = sum(driver.published for driver in drivers)
        # The log goes on after the last fault.
        wait_for(lambda: sum(driver.published for driver in drivers) > done)
        assert any(isinstance(record, Takeover) for record in records)
        for driver in drivers:
            driver.stop.set()
        for driver in drivers:
            driver.join(30)

    everywhere(places, story)


def test_secrets_are_not_shown(places, caplog) -> None:
    def story(place: Place) -> None:
        store = place.store
        caplog.set_level(logging.DEBUG)
        link = place.open()
        one = lead(link, "a", store)
        link.cut()
        assert one.grant.lost.wait(30)
        assert "secret" not in link.group.url + caplog.text

    everywhere(places, story)


def test_a_leader_keeps_its_lead_while_zookeeper_restarts_within_its_session(store) -> None:
    server = ZooKeeper()
    group = open_leadership(f"zookeeper://{server.hosts}/cairn/job?session=60s", store=store)
    try:
        driver = Driver(group, "a", store)
        assert driver.leads.wait(30)
        server.stop()
        server.start()
        wait_for(lambda: group.leader() is not None, 60)
        published = driver.published
        wait_for(lambda: driver.published > published)
        assert not driver.grant.lost.is_set()
    finally:
        group.close()
        server.close()


def test_a_server_that_accepts_a_connection_and_does_not_answer_costs_no_lead(store) -> None:
    server = ZooKeeper()
    group = open_leadership(f"zookeeper://{server.hosts}/cairn/job?session=8s", store=store)
    try:
        driver = Driver(group, "a", store)
        assert driver.leads.wait(30)
        server.stop()
        with socket.create_server(("127.0.0.1", server.port)) as deaf:
            deaf.settimeout(30)
            silent, _ = deaf.accept()
        server.start()
        wait_for(lambda: group.leader() is not None)
        silent.close()
        published = driver.published
        wait_for(lambda: driver.published > published)
        assert not driver.grant.lost.is_set()
    finally:
        group.close()
        server.close()


def test_a_leader_without_zookeeper_stops_with_its_session_and_leads_again(store) -> None:
    server = ZooKeeper()
    group = open_leadership(f"zookeeper://{server.hosts}/cairn/job?session=1s", store=store)
    try:
        driver = Driver(group, "a", store, repeats=True)
        assert driver.leads.wait(30)
        grant = driver.grant
        server.stop()
        assert grant.lost.wait(30)
        wait_for(lambda: not driver.leads.is_set())
        server.start()
        assert driver.leads.wait(60) and driver.grant is not grant
    finally:
        group.close()
        server.close()
    check_log(store)


@pytest.mark.parametrize("lost", [0, for_soak(1), for_soak(2)])
def test_an_ensemble_that_loses_one_server_still_grants_the_lead(store, lost: int) -> None:
    ensemble = Ensemble()
    url = f"zookeeper://{ensemble.hosts}/cairn/job?session=4s"
    groups = [open_leadership(url, store=store) for _ in range(2)]
    try:
        one = Driver(groups[0], "a", store, repeats=True)
        assert one.leads.wait(60)
        two = Driver(groups[1], "b", store, repeats=True)
        wait_for(lambda: len(groups[0].waiting()) == 1)
        ensemble.servers[lost].stop()
        before = one.published + two.published
        wait_for(lambda: one.published + two.published > before + 30, 60)
        wait_for(lambda: len(groups[0].waiting()) == 1, 60)
        leading, other = (one, two) if one.leads.is_set() else (two, one)
        leading.grant.resign(to=other.identity)
        assert other.leads.wait(60)
    finally:
        for group in groups:
            group.close()
        ensemble.close()
    check_log(store)


def _python_path() -> str:
    root = Path(__file__).parents[2]
    return os.pathsep.join([str(root), str(root / "src")])
