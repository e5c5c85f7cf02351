"""Executors and hosts are lost and come back. The checkpoint is in a bucket.

`ledger` writes through three sinks into a folder that all hosts have; its output and state are
compared with those of a run that nothing disturbed.
"""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from tests.cluster.cluster import LOST_S
from tests.spark.programs.ledger import SCHEMA, payments
from tests.spark.support import Input, eventually
from tests.spark.test_crashes import Undisturbed

FILES = 12


@pytest.fixture(scope="module")
def expected(spark, tmp_path_factory):
    return Undisturbed(spark, tmp_path_factory.mktemp("expected"), FILES)


class Running:
    """A program on the cluster, fed one file at a time."""

    def __init__(self, cluster, program, source):
        self.cluster = cluster
        self.program = program
        self.source = source
        self.files = payments(FILES)

    def feed(self):
        """One more file; the placement of the subtasks in its epoch, as host:pid."""
        self.source.add(*self.files[self.source.count])
        report = self.program.await_report(epoch=1 + self.source.count)
        return list(report["placement"].values())

    def feed_until(self, holds):
        """Feed files until the hosts of the subtasks are as wanted; whether they came to be so."""
        while self.source.count < FILES:
            if holds({place.partition(":")[0] for place in self.feed()}):
                return True
            time.sleep(1)
        return False

    def feed_rest(self):
        while self.source.count < FILES:
            self.feed()

    def slots(self):
        return [slot for host in self.cluster.workers for slot in self.cluster.slots(host)]


@contextmanager
def running(cluster, expected, name, *arguments, parallelism=2, **conf):
    """A run of `ledger`; at the end its output and state are those of an undisturbed run."""
    work = cluster.folder / name
    source = Input(work / "in", SCHEMA)
    url = f"{cluster.s3.url}/{name}"
    fixed = ("--trigger", "0 seconds", "--parallelism", parallelism, "--checkpoint", url)
    with (
        cluster.s3.in_environment(),
        cluster.program("ledger", source.folder, work, *fixed, *arguments, **conf) as program,
    ):
        program.await_report()
        run = Running(cluster, program, source)
        yield run
        run.feed_rest()
        assert eventually(lambda: len(run.slots()) == parallelism), "copies that moved have ended"
        cluster.interrupt(program)
        program.end()
        expected.check(work, url)
    assert eventually(lambda: not run.slots()), "no slot outlives the run"


def both(hosts):
    return hosts == {"w1", "w2"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_executor_killed_on_another_host_changes_nothing_and_its_slots_end(cluster, expected):
    with running(cluster, expected, "executor") as run:
        assert run.feed_until(both), "subtasks are spread over the hosts"
        host = cluster.hosts.hosts["w1"]
        old = {process.pid for process in cluster.slots(host)}
        assert old
        cluster.executors(host)[0].kill()
        assert run.feed_until(both), "subtasks are spread out again"
        assert eventually(lambda: not old & {slot.pid for slot in run.slots()})


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_host_that_lost_power_is_replaced_by_an_added_worker(cluster, expected):
    """Its processes end at once, without a word: master and driver hear nothing of it."""
    lost = cluster.add_worker("w3")
    with running(cluster, expected, "host", parallelism=3) as run:
        assert run.feed_until(lambda hosts: "w3" in hosts and len(hosts) == 3)
        lost.kill()
        del cluster.hosts.hosts["w3"]
        assert run.feed_until(lambda hosts: hosts <= {"w1", "w2"})
        added = cluster.add_worker("w4")
        assert run.feed_until(lambda hosts: "w4" in hosts), "subtasks come to the new host"
    added.kill()
    del cluster.hosts.hosts["w4"]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_slots_of_a_host_that_was_cut_off_change_nothing_when_it_comes_back(cluster, expected):
    with running(cluster, expected, "cut") as run:
        assert run.feed_until(both)
        host = cluster.hosts.hosts["w1"]
        old = {process.pid for process in cluster.slots(host)}
        host.cut()
        try:
            assert run.feed_until(lambda hosts: hosts == {"w2"}), "the job goes on without it"
            time.sleep(2 * LOST_S)
            assert old & {slot.pid for slot in run.slots()}, "they live on, and know nothing"
        finally:
            host.heal()
        assert run.feed_until(both), "the host takes part again"
        assert eventually(lambda: not old & {slot.pid for slot in run.slots()}, within_s=60)
