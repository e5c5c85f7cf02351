"""Spark allocates executors dynamically while a job with state runs."""

from __future__ import annotations

import time

import pytest

from tests.cluster.running import FILES, running
from tests.spark.support import eventually

IDLE_S = 15
"""Long enough for an executor that has come to get its subtasks."""
LATE_S = 4
DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "4",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "2s",
    "spark.dynamicAllocation.executorIdleTimeout": f"{IDLE_S}s",
    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "600s",
    "spark.dynamicAllocation.shuffleTracking.timeout": f"{IDLE_S}s",
    "spark.executor.cores": "1",
}
GROWS_AFTER, SHRINKS_AFTER = 2, 12


def executors(cluster):
    return sum(len(cluster.executors(host)) for host in cluster.workers)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_executors_follow_the_subtasks_from_one_to_four_and_back(cluster, expected):
    """Subtasks begin late while there are four: others wait for them, so Spark asks for executors.

    All of them do, also one that has no rows.
    """
    # Epoch 2 has the first file.
    trap = f"late {GROWS_AFTER + 1}-{SHRINKS_AFTER + 1} {LATE_S}"
    change = ("--change", f"{GROWS_AFTER}:rescale=4", f"{SHRINKS_AFTER}:rescale=1")
    options = {"parallelism": 1, "ends_with": 1, "trap": trap}
    with (
        cluster.worker("w5"),
        cluster.worker("w6"),
        running(cluster, expected, "allocation", *change, **options, **DYNAMIC) as run,
    ):
        for _ in range(GROWS_AFTER):
            run.feed()
        # On a busy machine the first tasks may have waited long enough for more.
        assert eventually(lambda: executors(cluster) == 1, within_s=4 * IDLE_S)
        seen = []
        while run.source.count < SHRINKS_AFTER:
            seen.append(len({place.partition(":")[0] for place in run.feed()}))
        assert seen[-1] == 4, f"subtasks on four executors: {seen}"
        assert len(run.feed()) == 1
        # Epochs go on, more often than an executor would have to be idle.
        while run.source.count < FILES and executors(cluster) > 1:
            run.feed()
            time.sleep(IDLE_S / 3)
        assert eventually(lambda: executors(cluster) == 1, within_s=5)
