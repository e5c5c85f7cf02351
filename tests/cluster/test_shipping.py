"""Code that is shipped with the job reaches the slots on every host."""

from __future__ import annotations

import zipfile

import pytest

from tests.spark.programs.shipped import SCHEMA
from tests.spark.support import Input, published

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def test_a_module_in_py_files_is_loaded_by_slots_from_the_folder_of_their_executor(cluster):
    work = cluster.folder / "shipped"
    source = Input(work / "in", SCHEMA).add_all([[(1,), (2,), (3,)], [(1,)]])
    with zipfile.ZipFile(work / "code.zip", "w") as code:
        code.writestr("shipped_rules.py", "def score(k):\n    return 10 * k\n")
    url = f"{cluster.s3.url}/shipped"
    submit = {"PYSPARK_SUBMIT_ARGS": f"--py-files {work / 'code.zip'} pyspark-shell"}
    with cluster.program(
        "shipped", source.folder, work, "--checkpoint", url, environment=submit
    ) as program:
        assert program.end()[-1]["end"] == "finished", program.errors[-3000:]
    found = published(work / "out")
    assert sorted((row["k"], row["total"]) for row in found) == [(1, 10), (1, 20), (2, 20), (3, 30)]
    # Relative to the working folder of the executor, and not where the driver has it.
    assert {row["file"] for row in found} == {"./code.zip/shipped_rules.py"}
