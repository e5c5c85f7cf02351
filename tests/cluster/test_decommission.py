"""An executor gets notice that it will end, as before a spot instance is taken away."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.running import running
from tests.spark.support import eventually

NOTICE = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.rddBlocks.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
    # Nobody waits for an executor that gets no tasks any more.
    "spark.locality.wait.process": "600s",
}


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_subtasks_leave_an_executor_that_is_decommissioned_before_it_ends(cluster, expected):
    with running(cluster, expected, "decommission", **NOTICE) as run:
        assert run.feed_until(lambda hosts: hosts == {"w1", "w2"})
        host = cluster.hosts.hosts["w1"]
        (executor,) = cluster.executors(host)
        old = {slot.pid for slot in cluster.slots(host)}
        executor.send_signal(signal.SIGPWR)
        # Between two epochs: the slot that will be needed is there before the next one begins.
        other = cluster.hosts.hosts["w2"]
        assert eventually(lambda: len(cluster.slots(other)) == 2), "it has read the state ahead"
        run.feed()
        assert run.newest["restored"] == 0, "no state is read within the epoch"
        assert eventually(lambda: not executor.is_running()), "it ends when its tasks have"
        assert eventually(lambda: not old & {slot.pid for slot in run.slots()})
        assert run.feed_until(lambda hosts: hosts == {"w1", "w2"}), "another one comes for it"
