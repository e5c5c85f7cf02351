"""Set-ups that cannot work on a cluster are refused before the takeover, and leave nothing."""

from __future__ import annotations

import pytest

from cairn.storage.store import open_store
from tests.spark.programs.ledger import SCHEMA, payments
from tests.spark.support import Input

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def refusal(cluster, name, checkpoint):
    """The error with which `ledger` does not start, after all executors have come."""
    cores = len(cluster.workers)
    all_there = {
        "spark.cores.max": str(cores),
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.default.parallelism": str(2 * cores),
    }
    source = Input(cluster.folder / name / "in", SCHEMA).add_all(payments(1))
    arguments = (source.folder, cluster.folder / name, "--checkpoint", checkpoint)
    with cluster.program("ledger", *arguments, "--parallelism", 2, **all_there) as program:
        program.end()
    assert program.process.returncode != 0
    return program.errors


def test_a_folder_of_the_drivers_host_is_refused_with_the_names_of_the_others(cluster):
    errors = refusal(cluster, "local", "/tmp/checkpoint")
    assert "PlanError: checkpoint file:///tmp/checkpoint is not the driver's on w1, w2" in errors
    left = cluster.driver.run(["find", "/tmp/checkpoint", "-type", "f"], stdout=-1, text=True)
    assert left.communicate()[0] == ""


def test_memory_of_the_drivers_host_is_refused(cluster):
    errors = refusal(cluster, "memory", "memory:")
    assert "lies in the memory of the driver's machine" in errors


def test_a_host_with_another_version_of_cairn_is_refused_by_name(cluster):
    other = cluster.folder / "other" / "cairn"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('__version__ = "0.0.9"\n')
    host = cluster.add_worker("w7", PYTHONPATH=str(other.parent))
    try:
        with cluster.s3.in_environment():
            url = f"{cluster.s3.url}/versions"
            errors = refusal(cluster, "versions", url)
            assert "PlanError: driver and executors differ: the driver runs cairn" in errors
            assert "on w7" in errors and "cairn 0.0.9" in errors
            assert open_store(url).list() == []
    finally:
        host.kill()
        del cluster.hosts.hosts["w7"]
