"""One cluster for all tests that can share it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.hosts import why_no_hosts
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
