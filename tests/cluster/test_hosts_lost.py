"""Executors and hosts are lost and come back. The checkpoint is in a bucket.

`ledger` writes through three sinks into a folder that all hosts have; its output and state are
compared with those of a run that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from tests.cluster.cluster import LOST_S
from tests.cluster.running import running
from tests.spark.support import eventually


def both(hosts):
    return hosts == {"w1", "w2"}


def test_the_worker_of_a_host_without_an_init_is_its_process_1(cluster):
    """It collects no processes that are left to it, as nothing does in many containers."""
    first = cluster.hosts.hosts["w2"].first
    status = Path(f"/proc/{first.pid}/status").read_text().splitlines()
    (numbers,) = [line.split()[1:] for line in status if line.startswith("NSpid:")]
    assert numbers[-1] == "1"
    assert first.name() == "java" and "org.apache.spark.deploy.worker.Worker" in first.cmdline()
    assert cluster.hosts.hosts["w1"].first.name() == "bash"


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
    with (
        cluster.worker("w3") as lost,
        contextlib.ExitStack() as later,
        running(cluster, expected, "host", parallelism=3) as run,
    ):
        assert run.feed_until(lambda hosts: "w3" in hosts and len(hosts) == 3)
        cluster.lose(lost)
        assert run.feed_until(lambda hosts: hosts <= {"w1", "w2"})
        later.enter_context(cluster.worker("w4"))
        assert run.feed_until(lambda hosts: "w4" in hosts), "subtasks come to the new host"


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
