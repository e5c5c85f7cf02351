"""The checkpoint in a bucket, and Spark without a file system for buckets.

The keys of the bucket expire after some seconds, and driver and slots ask for new ones.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from cairn.snapshots.branch import branch
from cairn.snapshots.saving import write_savepoint
from cairn.storage.store import open_store
from tests.s3 import s3_server
from tests.spark.programs.ledger import SCHEMA, payments
from tests.spark.support import Input, Program, epochs
from tests.spark.test_crashes import Undisturbed

FILES = 4
EXPIRING = {
    "CAIRN_CREDENTIALS": "tests.s3:expiring",
    "CAIRN_TEST_KEY_MS": "8000",
    "AWS_ACCESS_KEY_ID": "until-1",
}


@pytest.fixture
def short():
    """A folder for runtime folders, whose paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="cr-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["restart", pytest.param("others", marks=pytest.mark.soak)])
def test_job_goes_on_from_a_bucket_on_another_host_without_a_file_of_sparks(
    spark, short, tmp_path, way
):
    """The runtime folder of the first driver is not that of the second, as on another host."""
    expected = Undisturbed(spark, tmp_path / "expected", FILES)
    files, work = payments(FILES), tmp_path / "work"
    source = Input(work / "in", SCHEMA).add_all(files[:2])
    with s3_server() as s3, s3.in_environment():
        url = f"{s3.url}/first"

        def run(number, checkpoint, *arguments):
            runtime = short / f"r{number}"
            given = (source.folder, work, "--checkpoint", checkpoint, *arguments)
            environment = {"CAIRN_RUNTIME_DIR": str(runtime), **EXPIRING}
            with Program("ledger", *given, **environment) as program:
                assert program.end()[-1]["end"] == "finished", program.errors[-3000:]
            assert not list(runtime.glob("*/*/p-spark")), "removed with the run"

        run(1, url)
        assert not open_store(url).list("spark"), "Spark's folder is not in the bucket"
        assert len(epochs(url)) == 2
        if way == "others":
            write_savepoint(open_store(url), None, f"{s3.url}/savepoint")
            branch(open_store(url), None, f"{s3.url}/branch")
        source.add_all(files[2:])
        run(2, url, "--parallelism", 3)
        expected.check(work, url)
        if way == "others":
            run(3, f"{s3.url}/second", "--savepoint", f"{s3.url}/savepoint")
            expected.check_state(f"{s3.url}/second")
            run(4, f"{s3.url}/branch")
            expected.check_state(f"{s3.url}/branch")
