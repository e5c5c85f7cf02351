"""A job whose checkpoint is in HDFS: what is killed there, and in the job, costs no row."""

from __future__ import annotations

import time

import pytest

from cairn.storage.store import open_store
from tests.hdfs import hdfs
from tests.spark.support import Program
from tests.spark.test_crashes import Undisturbed

FILES = 4


@pytest.fixture(scope="module")
def short(spark, tmp_path_factory):
    return Undisturbed(spark, tmp_path_factory.mktemp("short"), FILES)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_drivers_a_slot_and_the_namenode_that_are_killed_lose_nothing_in_hdfs(
    spark, short, tmp_path
):
    server = hdfs()
    url = server.url("jobs/ledger")
    program = ("ledger", short.input.folder, tmp_path, "--checkpoint", url, "--parallelism", 2)
    for point in ("driver.epoch.ran:1", "driver.manifest.written:2"):
        with Program(*program, on=spark, CAIRN_CRASH_AT=point) as driver:
            driver.end()
            assert driver.killed, driver.errors[-3000:]
    assert short.check_prefix(tmp_path) < FILES
    died = tmp_path / "died"
    crash = {"CAIRN_CRASH_AT": "slot.sink.prepared:2", "CAIRN_CRASH_ONCE": str(died)}
    # With a Spark of its own: its slots have its environment.
    with Program(*program, **crash) as driver:
        driver.await_report(epoch=6)
        server.namenode.kill()
        time.sleep(3)
        server.namenode.start()
        assert driver.end()[-1]["end"] == "finished", driver.errors[-3000:]
    assert died.exists()
    short.check(tmp_path, url)
    assert not open_store(url).list_unfinished()
