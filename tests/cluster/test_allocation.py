"""Executors that Spark's dynamic allocation adds and removes while a job with state runs."""

from __future__ import annotations

import pytest

from tests.cluster.test_hosts_lost import expected, running  # noqa: F401
from tests.spark.support import eventually

QUICK = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "4",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
    "spark.dynamicAllocation.executorIdleTimeout": "3s",
    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "3s",
    "spark.dynamicAllocation.shuffleTracking.timeout": "3s",
    "spark.executor.cores": "1",
}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_executors_follow_the_parallelism_from_one_to_four_and_back(cluster, expected):  # noqa: F811
    added = [cluster.add_worker(name) for name in ("w5", "w6")]

    def executors():
        return sum(len(cluster.executors(host)) for host in cluster.workers)

    changes = ("--change", "3:rescale=4", "8:rescale=1")
    # Slow rows: Spark asks for executors when tasks have waited for a while.
    slow = {"TRAP": "sleep * 0.06"}
    try:
        with running(
            cluster, expected, "allocation", *changes, parallelism=1, environment=slow, **QUICK
        ) as run:
            run.feed()
            assert eventually(lambda: executors() == 1, within_s=60)
            while run.source.count < 4:
                run.feed()
            assert run.feed_until(lambda hosts: len(hosts) == 4), "a host for each subtask"
            assert executors() == 4
            while run.source.count < 10:
                run.feed()
            assert eventually(lambda: executors() == 1, within_s=90), "nothing holds the others"
    finally:
        for host in added:
            host.kill()
            del cluster.hosts.hosts[host.name]
