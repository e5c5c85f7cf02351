"""Who leads, read from outside: the records of `store:` are watched, no clock is compared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cairn.driver.coordinator.leadership import open_leadership
from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.leadership.in_store import LeaderRecord, StandbyRecord
from cairn.driver.group import Group
from cairn.errors import QueryError
from cairn.query.leading import _read_records, look_at_group, read_lead, watch
from cairn.storage.notes import write_group
from cairn.storage.paths import LEADER_PATH, STANDBYS_FOLDER
from cairn.storage.store import Store, open_store
from tests.kubernetes_api import KubernetesApi
from tests.unit.cli.command_line import call, json_of
from tests.unit.snapshots.checkpoints import Checkpoint, value


class Drivers:
    """Writes the records of drivers as they would, whenever a watcher sleeps."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_s = 0.0
        self.at_work: list[Callable[[int], None]] = []
        self._count = 0

    def lead(self, host: str, *, resigned: bool = False) -> Callable[[int], None]:
        member = Member(identity=host, host=host, pid=1, url=f"http://{host}:80", since_ms=1)

        def write(count: int) -> None:
            record = LeaderRecord(term=1, counter=count, member=member, resigned=resigned)
            self.store.put(LEADER_PATH, msgspec.json.encode(record))

        write(0)
        return write

    def wait(self, host: str, **facts: object) -> Callable[[int], None]:
        member = msgspec.structs.replace(Member(identity=host, host=host, pid=1), **facts)

        def write(count: int) -> None:
            record = StandbyRecord(counter=count, member=member)
            self.store.put(f"{STANDBYS_FOLDER}/{host}.json", msgspec.json.encode(record))

        write(0)
        return write

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._count += 1
        for write in self.at_work:
            write(self._count)

    def watch(self) -> Group:
        url, lease_s = "store:?lease=10s", 10.0
        return watch(
            lambda: _read_records(self.store), url, lease_s,
            clock=lambda: self.now_s, sleep=self.sleep,
        )  # fmt: skip


@pytest.fixture
def drivers() -> Drivers:
    return Drivers(open_store("memory:"))


def hosts(members: list[Member]) -> list[str]:
    return [member.host for member in members]


def test_drivers_whose_records_change_are_alive_and_known_before_the_lease_is_over(
    drivers: Drivers,
) -> None:
    drivers.at_work = [drivers.lead("a"), drivers.wait("c", since_ms=2), drivers.wait("b")]
    found = drivers.watch()
    assert found.leader is not None and found.leader.host == "a"
    assert hosts(found.standbys) == ["b", "c"] and drivers.now_s < 1.0


def test_drivers_whose_records_stay_the_same_for_a_lease_are_gone(drivers: Drivers) -> None:
    drivers.lead("a")
    drivers.wait("b")
    drivers.at_work = [drivers.wait("c")]
    found = drivers.watch()
    assert found.leader is None and hosts(found.standbys) == ["c"]
    assert 10.0 <= drivers.now_s <= 11.0


def test_a_leader_that_has_resigned_leads_no_more_and_is_not_waited_for(drivers: Drivers) -> None:
    drivers.lead("a", resigned=True)
    assert drivers.watch().leader is None and drivers.now_s < 1.0


def test_a_leader_that_comes_meanwhile_is_found_and_damage_is_left_out(drivers: Drivers) -> None:
    drivers.store.put(f"{STANDBYS_FOLDER}/x.json", b"{")
    drivers.wait("dead")
    drivers.at_work = [lambda count: drivers.lead("a")(count) if count > 3 else None]
    found = drivers.watch()
    assert found.leader is not None and (found.leader.host, found.standbys) == ("a", [])


def test_leases_of_drivers_that_were_killed_are_seen_as_gone(
    drivers: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease stays in Kubernetes, and looks as it did when its holder was alive."""
    api = KubernetesApi()
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig")))
    url = "kubernetes:lease/fraud?lease=1s"
    leading, waiting = (open_leadership(url, store=drivers.store) for _ in range(2))
    stop = threading.Event()
    try:
        grant = leading.campaign(Member(identity="a", host="ada", pid=1), stop)
        assert grant is not None
        campaign = threading.Thread(
            target=waiting.campaign, args=(Member(identity="b", host="bob", pid=2), stop)
        )
        campaign.start()
        for _ in range(1000):
            if leading.waiting():
                break
            threading.Event().wait(0.01)
        found = look_at_group(url, drivers.store)
        assert found.leader is not None and found.leader.host == "ada"
        assert hosts(found.standbys) == ["bob"]
        stop.set()
        campaign.join()
        grant.lost.set()  # As if it were killed: nobody renews the lease or gives it up.
        threading.Event().wait(0.5)
        found = look_at_group(url, drivers.store)
        assert (found.leader, found.standbys) == (None, [])
    finally:
        stop.set()
        api.close()


@pytest.mark.parametrize(
    "url", ["zookeeper://127.0.0.1:1/fraud?session=1s", "kubernetes:lease/fraud?lease=1s"]
)
def test_a_service_that_does_not_answer_is_an_error_and_not_a_group_without_a_leader(
    drivers: Drivers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    api = KubernetesApi()
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig", port=1)))
    api.close()
    with pytest.raises(QueryError, match="cannot be read"):
        look_at_group(url, drivers.store)


def test_a_group_is_found_from_the_checkpoint_alone(tmp_path: Path) -> None:
    made = Checkpoint({"n": value("bigint")}, store=open_store(str(tmp_path)))
    made.commit({"n": {1: 1}})
    assert read_lead(made.store).group is None
    alone = call("leader", tmp_path)
    assert "no group" in alone.stdout and "pid" in alone.stdout
    write_group(made.store, 1, "store:?lease=100ms")
    group = read_lead(made.store).group
    assert group is not None and (group.url, group.leader) == ("store:?lease=0.1s", None)
    shown = call("leader", tmp_path)
    assert shown.exit_code == 1 and "leader nobody" in shown.stdout, "nobody renews a record"
    assert "nobody would take over" in shown.stdout


def test_the_command_prints_who_leads_who_waits_and_what_would_refuse_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Checkpoint({"n": value("bigint")}, store=open_store(str(tmp_path)))
    made.commit({"n": {1: 1}})
    group = Group(
        url="zookeeper://zk:2181/fraud?session=10s",
        leader=Member(identity="1", host="ada", pid=7, url="http://ada:80", since_ms=1),
        standbys=[
            Member(identity="2", host="bob", pid=8, standby="hot", epoch=41),
            Member(identity="3", host="eve", pid=9, refusal="state 'n': string\n  next: rename it"),
        ],
    )
    monkeypatch.setattr("cairn.query.leading.look_at_group", lambda url, store: group)
    result = call("leader", tmp_path, "--ha", "zookeeper://user:secret@zk:2181/fraud")
    assert result.exit_code == 0 and "secret" not in result.stdout
    for text in ("ada, pid 7", "http://ada:80", "bob", "hot", "41", "eve would be refused: state"):
        assert text in result.stdout
    found = json_of("leader", tmp_path, "--ha", "zookeeper://zk:2181/fraud")
    assert found["group"] == msgspec.to_builtins(group) and found["driver"]["term"] == 1
