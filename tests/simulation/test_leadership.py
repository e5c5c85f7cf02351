"""Leaders, standbys, pauses and lost acknowledgements over `store:` and the real log.

Every driver has a clock of its own, which runs on while it is paused. A failure prints its seed.
"""

from __future__ import annotations

import random

import pytest

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.leadership.in_store import StoreGrant, StoreLeadership
from cairn.errors import CairnError
from cairn.storage.log import Log, new_nonce
from cairn.storage.manifest import Epoch, SparkPosition, Takeover
from cairn.storage.store import Store, open_store
from cairn.testing.clock import ManualClock
from cairn.testing.faulty_store import FaultyStore
from tests.marks import for_soak

LEASE_S = 10.0
SEEDS = 5
"""Schedules of one test."""


class Driver:
    """Campaigns, takes over, publishes one epoch at a time, and goes back to standby."""

    def __init__(self, name: str, store: FaultyStore, clock: ManualClock) -> None:
        self.name, self.store, self.clock = name, store, clock
        self.acknowledged: list[tuple[int, str]] = []
        self.paused = 0
        self.starts = 0
        self.campaign()

    def campaign(self) -> None:
        self.starts += 1
        self.grant: StoreGrant | None = None
        self.log: Log | None = None
        self.group = StoreLeadership(
            self.store,
            lease_s=LEASE_S,
            clock=lambda: self.clock.now_ms / 1000,
            in_background=False,
        )
        self.group.member = Member(identity=f"{self.name}-{self.starts}", host="h", pid=1)

    def act(self) -> None:
        try:
            self._act()
        except (CairnError, OSError):
            self.campaign()

    def _act(self) -> None:
        if self.grant is None:
            self.grant = self.group.poll()
        elif self.log is None:
            log = Log(self.store, sleep=lambda seconds: None)
            taken = log.take_over(
                host="h",
                pid=1,
                wall_ms=0,
                only_if_last=self.grant.only_if_last,
                is_held=self.grant.check,
            )
            self.log = log
            self.grant.confirm(taken.term)
        else:
            self.grant.renew()
            if not self.grant.check():
                self.campaign()
                return
            self._publish(self.log)

    def _publish(self, log: Log) -> None:
        newest = log.newest_epoch()
        nonce = new_nonce()

        def make(number: int) -> Epoch:
            return Epoch(
                number=number, parent=newest.number if newest else None, term=1, nonce=nonce,
                wall_ms=1, now_ms=1, watermarks={}, operators={},
                spark=SparkPosition(folder="spark/0", batch_id=0, offsets=""),
            )  # fmt: skip

        record = log.append(make)
        self.acknowledged.append((record.number, nonce))


def run(seed: int) -> tuple[Store, list[Driver]]:
    chance = random.Random(seed)
    inner = open_store("memory:")
    drivers = [
        Driver(
            f"d{index}",
            FaultyStore(inner, seed=seed * 10 + index, fault_rate=chance.choice([0, 0.02, 0.1])),
            ManualClock(chance.randrange(10**6)),
        )
        for index in range(chance.randint(2, 4))
    ]
    for _ in range(60):
        for driver in chance.sample(drivers, len(drivers)):
            if driver.paused:
                driver.paused -= 1
            elif chance.random() < 0.05:
                driver.paused = chance.randint(1, 15)
            elif chance.random() < 0.02:
                driver.campaign()  # Killed, and started again.
            else:
                driver.act()
        for driver in drivers:
            driver.clock.advance_ms(chance.randint(500, 4000))
    return inner, drivers


def check(seed: int) -> None:
    store, drivers = run(seed)
    log = Log(store)
    published = [record for record in log.records() if isinstance(record, Epoch)]
    by_number = {epoch.number: epoch.nonce for epoch in published}
    before = None
    for epoch in published:
        assert epoch.parent == before, f"seed {seed}: epoch {epoch.number} is out of order"
        before = epoch.number
    acknowledged = [each for driver in drivers for each in driver.acknowledged]
    assert len(acknowledged) == len(set(acknowledged)), f"seed {seed}: published twice"
    for number, nonce in acknowledged:
        assert by_number.get(number) == nonce, f"seed {seed}: epoch {number} was lost"
    settle(seed, store, drivers)


def settle(seed: int, store: Store, drivers: list[Driver]) -> None:
    """Without faults, one driver leads after a few leases, and nobody fences it any more."""
    for driver in drivers:
        driver.store.enabled, driver.paused = False, 0
    takeovers = 0
    for turn in range(60):
        for driver in drivers:
            driver.act()
            driver.clock.advance_ms(2000)
        if turn == 29:
            takeovers = sum(isinstance(r, Takeover) for r in Log(store).records())
    leading = [d for d in drivers if d.log is not None and d.grant and d.grant.check()]
    assert len(leading) == 1, f"seed {seed}: {len(leading)} drivers lead"
    after = sum(isinstance(record, Takeover) for record in Log(store).records())
    assert after == takeovers, f"seed {seed}: drivers fence each other in turn"


@pytest.mark.parametrize("block", [*range(10), *map(for_soak, range(10, 500))])
def test_no_published_epoch_is_lost_repeated_or_out_of_order_and_one_driver_leads(
    block: int,
) -> None:
    for seed in range(block * SEEDS, block * SEEDS + SEEDS):
        check(seed)
