"""Code that is shipped with the job reaches the slots on every host."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import venv_pack
from pyspark.find_spark_home import _find_spark_home

from tests.cluster.environments import make_environment
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


SPARK_AT = "/opt/spark"
PYTHON_HOME = Path(sys.base_prefix)
SYSTEM = {
    at: Path(at) for at in ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr") if Path(at).exists()
}
IMAGE = {**SYSTEM, str(PYTHON_HOME): PYTHON_HOME, SPARK_AT: Path(_find_spark_home())}
"""A system with Java and Python, and Spark: no cairn, and no package of Python."""


@pytest.fixture(scope="module")
def environment(cluster) -> Path:
    return make_environment(cluster.folder / "environment")


def score_rules(folder: Path) -> str:
    """The options of spark-submit for the job's own module."""
    with zipfile.ZipFile(folder / "code.zip", "w") as code:
        code.writestr("shipped_rules.py", "def score(k):\n    return 10 * k\n")
    return f"--py-files {folder / 'code.zip'}"


def scores(cluster, name: str, python: str, options: str) -> list[tuple[int, int]]:
    """Run the program on the hosts of two cores, with this Python on its executors."""
    work = cluster.folder / name
    source = Input(work / "in", SCHEMA).add_all([[(1,), (2,), (3,)], [(1,)]])
    submit = f"{options} {score_rules(work)} pyspark-shell"
    with cluster.program(
        "shipped",
        source.folder,
        work,
        "--checkpoint",
        f"{cluster.s3.url}/{name}",
        environment={"PYSPARK_SUBMIT_ARGS": submit, "PYSPARK_PYTHON": python},
        # The other hosts have one core.
        **{"spark.executor.cores": "2", "spark.executorEnv.PYTHONPATH": ""},
    ) as program:
        assert program.end()[-1]["end"] == "finished", program.errors[-3000:]
    return sorted((row["k"], row["total"]) for row in published(work / "out"))


SCORES = [(1, 10), (1, 20), (2, 20), (3, 30)]


def test_an_environment_in_archives_is_all_the_python_that_a_host_needs(cluster, environment):
    archive = cluster.folder / "environment.tar.gz"
    venv_pack.pack(prefix=str(environment), output=str(archive), compress_level=1)
    with cluster.worker_in("w10", IMAGE, SPARK_AT):
        options = f"--archives {archive}#environment"
        assert scores(cluster, "archived", "./environment/bin/python", options) == SCORES


def test_an_image_with_the_environment_is_all_that_a_host_needs(cluster, environment):
    image = {**IMAGE, "/opt/venv": environment}
    with cluster.worker_in("w11", image, SPARK_AT):
        assert scores(cluster, "image", "/opt/venv/bin/python", "") == SCORES
