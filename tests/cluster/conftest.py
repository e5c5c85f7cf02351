"""One cluster for all tests that can share it."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.hosts import why_no_hosts
from tests.cluster.running import FILES
from tests.spark.conftest import spark  # noqa: F401  # The undisturbed runs need one.


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(f"NO CLUSTER TESTS: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="cairn-cluster-"))
    try:
        with Cluster(folder) as made:
            made.add_worker("w1")
            made.add_worker("w2", is_first=True)
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def expected(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: F811
    """What a run comes to that nothing disturbs."""
    crashes = importlib.import_module("tests.spark.test_crashes")
    return crashes.Undisturbed(spark, tmp_path_factory.mktemp("expected"), FILES)
