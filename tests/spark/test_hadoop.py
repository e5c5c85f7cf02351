"""A job whose checkpoint is reached by Hadoop's own client: a kill there costs no row."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from cairn.storage.paths import PROBE_PREFIX
from cairn.storage.store import open_store
from tests.hdfs import hdfs
from tests.spark.support import Program
from tests.spark.test_crashes import Undisturbed

FILES = 4
MOUNT = "spark.hadoop.fs.viewfs.mounttable.session.link./jobs"


@pytest.fixture(scope="module")
def short(spark, tmp_path_factory):
    return Undisturbed(spark, tmp_path_factory.mktemp("short"), FILES)


@pytest.fixture
def runtime():
    """A runtime folder of its own, whose path must be short."""
    folder = Path(tempfile.mkdtemp(prefix="cr-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def jvms(runtime: Path) -> list[psutil.Process]:
    """The JVMs of Hadoop's client that hold the pipe of this runtime folder."""
    pipes = {str(path.resolve()) for path in runtime.glob("hadoop-*/alive")}
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = str(Path(f"/proc/{process.pid}/fd/0").resolve()) in pipes
        except OSError:
            continue
        if is_ours and "py4j.GatewayServer" in process.cmdline():
            found.append(process)
    return found


def cairn(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cairn", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_drivers_a_slot_the_jvm_and_the_namenode_that_are_killed_lose_nothing(
    short, runtime, tmp_path, monkeypatch
):
    """The drivers' sessions know the mount table, and the slots have it from them alone."""
    server = hdfs()
    name = uuid.uuid4().hex
    url = f"hadoop+viewfs://session/jobs/{name}"
    given = {"CAIRN_RUNTIME_DIR": str(runtime)}
    program = ("ledger", short.input.folder, tmp_path, "--checkpoint", url, "--parallelism", 2)
    program += ("--conf", f"{MOUNT}={server.url('mounted')}", "spark.locality.wait=60s")
    for point in ("driver.epoch.ran:1", "driver.manifest.written:2"):
        with Program(*program, **given, CAIRN_CRASH_AT=point) as driver:
            driver.end()
            assert driver.killed, driver.errors[-3000:]
    died = tmp_path / "died"
    crash = {"CAIRN_CRASH_AT": "slot.sink.prepared:2", "CAIRN_CRASH_ONCE": str(died)}
    with Program(*program, **given, **crash) as driver:
        driver.await_report(epoch=6)
        (jvm,) = jvms(runtime)  # Driver and slots share one.
        jvm.kill()
        server.namenode.kill()
        time.sleep(3)
        server.namenode.start()
        assert driver.end()[-1]["end"] == "finished", driver.errors[-3000:]
    assert died.exists()
    # Offline, the settings are those of HADOOP_CONF_DIR.
    monkeypatch.setenv("HADOOP_CONF_DIR", server.settings)
    url = f"hadoop+viewfs://cairn/jobs/{name}"
    short.check(tmp_path, url)
    # A start that met no namenode may have left hidden files of its probe, and nothing else.
    left = open_store(url).list_unfinished()
    assert all(target.startswith(PROBE_PREFIX) for target in left.values())
    assert "ledger" in cairn("show", url) and cairn("ls", url) and cairn("verify", url)
