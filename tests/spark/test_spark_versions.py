"""The oldest Spark that works; all tests run on the newest one that PyPI has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

ROOT = Path(__file__).parents[2]
NOT_FETCHED = 3


def test_python_and_the_jvm_are_of_the_version_that_is_tested(spark):
    expected = os.environ.get("CAIRN_SPARK_VERSION", pyspark.__version__)
    assert (pyspark.__version__, spark.version) == (expected, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("CAIRN_SPARK_VERSION" in os.environ, reason="the selection itself")
def test_a_short_selection_passes_over_the_oldest_spark():
    done = subprocess.run(
        [ROOT / ".ci" / "spark-versions", "--short"],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode == NOT_FETCHED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
