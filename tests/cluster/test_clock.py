"""The wall clock of one host is set by an hour, ahead and back, while a job with state runs."""

from __future__ import annotations

import os
import sys
import time

import pytest

import tests.clock
from tests.cluster.running import running

HOUR_S = 3600
LOOKS_S = 3
"""The time in which slots and nursery look for reasons to end, some times."""


def seen(process):
    """The variables that a process was started with."""
    return " ".join(process.environ().values())


def time_on(host, environment):
    """The time that a Python process with these variables has there."""
    command = [sys.executable, "-c", "import time; print(time.time())"]
    return float(host.run(command, env=environment, stdout=-1, text=True).communicate()[0])


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_step_of_a_hosts_clock_ends_no_slot_and_restores_nothing(cluster, expected):
    clock = cluster.folder / "clock.offset"
    clock.write_text("0")
    path = os.pathsep.join([tests.clock.FOLDER, cluster.hosts.environment["PYTHONPATH"]])
    environment = {
        "PYTHONPATH": path,
        "CAIRN_TEST_CLOCK": str(clock),
        # Less than the step: by the wall clock all would have been idle for too long.
        "CAIRN_SLOT_LEASE_S": "600",
    }
    with (
        cluster.worker("w9", **environment) as host,
        running(cluster, expected, "clock", parallelism=3) as run,
    ):
        assert run.feed_until(lambda hosts: hosts == {"w1", "w2", "w9"})
        there = cluster.slots(host)
        assert there and all(environment["CAIRN_TEST_CLOCK"] in seen(slot) for slot in there)
        assert all(tests.clock.FOLDER in seen(slot) for slot in there)
        slots = {slot.pid for slot in run.slots()}
        for step_s in (HOUR_S, -HOUR_S):
            clock.write_text(str(step_s))
            assert abs(time_on(host, environment) - time.time() - step_s) < 600
            time.sleep(LOOKS_S)
            for _ in range(2):
                assert "w9" in {place.partition(":")[0] for place in run.feed()}
                assert run.newest["restored"] == 0
            assert {slot.pid for slot in run.slots()} == slots
