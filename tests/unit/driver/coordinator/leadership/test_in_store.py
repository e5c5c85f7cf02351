"""Leadership by records in the checkpoint."""

from __future__ import annotations

import threading

import pytest

from cairn.driver.coordinator.leadership import Member, open_leadership
from cairn.driver.coordinator.leadership.in_store import StoreGrant, StoreLeadership
from cairn.errors import CommitConflictError, PlanError
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.removal import delete_checkpoint
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from cairn.testing.clock import ManualClock
from cairn.testing.faulty_store import FaultyStore


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def group(store: Store, clock: ManualClock, name: str) -> StoreLeadership:
    made = StoreLeadership(
        store, lease_s=10, clock=lambda: clock.now_ms / 1000, in_background=False
    )
    made.member = Member(identity=name, host="h", pid=1)
    return made


def lead(leadership: StoreLeadership) -> StoreGrant:
    grant = leadership.poll()
    assert grant is not None
    taken = Log(leadership.store).take_over(
        host="h", pid=1, wall_ms=1, only_if_last=grant.only_if_last
    )
    grant.confirm(taken.term)
    return grant


def test_the_first_driver_of_an_empty_checkpoint_does_not_wait(store, clock) -> None:
    first = group(store, clock, "a")
    lead(first)
    assert first.leader().identity == "a"


def test_a_standby_waits_while_the_leader_renews(store, clock) -> None:
    grant = lead(group(store, clock, "a"))
    standby = group(store, clock, "b")
    for _ in range(20):
        assert standby.poll() is None
        clock.advance_ms(3000)
        grant.renew()
    assert grant.check() and [m.identity for m in standby.waiting()] == ["b"]


def test_a_silent_leader_is_replaced_after_a_lease_and_its_grant_is_lost(store, clock) -> None:
    grant = lead(group(store, clock, "a"))
    standby = group(store, clock, "b")
    assert standby.poll() is None
    clock.advance_ms(9_999)
    assert standby.poll() is None
    clock.advance_ms(1)
    lead(standby)
    grant.renew()
    assert grant.lost.is_set() and standby.leader().identity == "b"


def test_of_two_standbys_one_takes_over_and_the_other_waits_a_lease_again(store, clock) -> None:
    lead(group(store, clock, "a"))
    one, two = group(store, clock, "b"), group(store, clock, "c")
    assert one.poll() is None and two.poll() is None
    clock.advance_ms(10_000)
    late = two.poll()
    lead(one)
    with pytest.raises(CommitConflictError):
        Log(store).take_over(host="h", pid=1, wall_ms=1, only_if_last=late.only_if_last)
    assert two.poll() is None
    assert len(Log(store).numbers()) == 2


def test_a_record_of_the_log_is_a_sign_of_life(store, clock) -> None:
    lead(group(store, clock, "a"))
    standby = group(store, clock, "b")
    assert standby.poll() is None
    clock.advance_ms(9_000)
    Log(store).take_over(host="h", pid=1, wall_ms=1)
    assert standby.poll() is None
    clock.advance_ms(9_000)
    assert standby.poll() is None


def test_the_lead_passes_at_once_to_the_member_that_it_is_resigned_to(store, clock) -> None:
    grant = lead(group(store, clock, "a"))
    one, two = group(store, clock, "b"), group(store, clock, "c")
    grant.resign(to="c")
    grant.resign(to="b")
    assert grant.lost.is_set() and one.leader() is None
    assert one.poll() is None
    lead(two)
    assert one.leader().identity == "c"


def test_others_take_the_lead_after_a_lease_if_the_named_member_does_not(store, clock) -> None:
    grant = lead(group(store, clock, "a"))
    other = group(store, clock, "b")
    grant.resign(to="gone")
    assert other.poll() is None
    clock.advance_ms(10_000)
    lead(other)


def test_a_leader_whose_renewals_fail_loses_the_lead_with_its_lease(store, clock) -> None:
    faulty = FaultyStore(store, seed=1, fault_rate=1)
    faulty.enabled = False
    grant = lead(group(faulty, clock, "a"))
    faulty.enabled = True
    clock.advance_ms(9_999)
    grant.renew()
    assert grant.check()
    clock.advance_ms(1)
    assert not grant.check()
    faulty.enabled = False
    grant.renew()
    assert grant.lost.is_set()


def test_dead_standbys_are_no_longer_seen_and_their_files_are_removed(store, clock) -> None:
    leading = group(store, clock, "a")
    grant = lead(leading)
    group(store, clock, "b/x").poll()
    assert [m.identity for m in leading.waiting()] == ["b/x"]
    for _ in range(8):
        clock.advance_ms(3000)
        grant.renew()
    assert leading.waiting() == [] and store.list("standbys") == []


def test_verify_and_removal_know_the_records(store, clock) -> None:
    create_or_open_job(store, "job", 128)
    lead(group(store, clock, "a"))
    group(store, clock, "b").poll()
    report = verify(store)
    assert report.ok and not report.orphans
    delete_checkpoint(store)
    assert store.list() == []


def test_urls(store) -> None:
    assert open_leadership("store:?lease=2s", store=store).url == "store:?lease=2s"
    for wrong in ("store:x", "store:?least=2s", "store:?lease=0s", "etcd://h"):
        with pytest.raises(PlanError):
            open_leadership(wrong, store=store)


def test_a_resignation_that_is_written_late_does_not_end_the_lead_of_the_next(store, clock) -> None:
    late = lead(group(store, clock, "a"))
    standby, other = group(store, clock, "b"), group(store, clock, "c")
    assert standby.poll() is None
    clock.advance_ms(10_000)
    lead(standby)
    # The first leader was paused in the middle of resigning.
    late._put(resigned=True, to=None)
    assert other.poll() is None


def test_a_standby_that_was_paused_while_it_looked_has_seen_nothing(store, clock) -> None:
    grant = lead(group(store, clock, "a"))

    class Pausing(FaultyStore):
        """The process sleeps for three leases after it has read the leader's record."""

        is_pausing = False

        def get(self, path: str) -> bytes:
            data = super().get(path)
            if self.is_pausing and path == "leader.json":
                for _ in range(10):
                    clock.advance_ms(3_000)
                    grant.renew()
            return data

    slow = Pausing(store)
    standby = group(slow, clock, "b")
    assert standby.poll() is None
    slow.is_pausing = True
    assert standby.poll() is None
    assert grant.check()


def test_a_member_that_campaigns_again_is_seen_at_once(store, clock) -> None:
    one = group(store, clock, "a")
    grant = lead(one)
    assert store.list("standbys") == []
    grant.resign(to="b")
    stop = threading.Event()
    campaign = threading.Thread(target=one.campaign, args=(one.member, stop))
    campaign.start()
    while not store.list("standbys"):
        stop.wait(0.01)
    stop.set()
    campaign.join(30)
    assert store.list("standbys") == []
