"""Set-ups that cannot work on a cluster are refused before the takeover, and leave nothing."""

from __future__ import annotations

import pytest

from cairn.storage.store import open_store
from tests.s3 import s3_server
from tests.spark.programs.ledger import SCHEMA, payments
from tests.spark.support import Input

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def refusal(cluster, name, checkpoint, environment=None):
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
    arguments += ("--parallelism", 2)
    with cluster.program("ledger", *arguments, environment=environment, **all_there) as program:
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
    with cluster.worker("w7", PYTHONPATH=str(other.parent)), cluster.s3.in_environment():
        url = f"{cluster.s3.url}/versions"
        errors = refusal(cluster, "versions", url)
        assert "PlanError: driver and executors differ: the driver runs cairn" in errors
        assert "on w7" in errors and "cairn 0.0.9" in errors
        assert open_store(url).list() == []


def test_a_host_on_which_a_mount_is_missing_is_refused_by_name(cluster):
    mounted = cluster.folder / "mounted"
    mounted.mkdir()
    with cluster.worker("w8") as host:
        # There an empty folder of its own lies at the path.
        assert host.run(["mount", "-t", "tmpfs", "tmpfs", str(mounted)]).wait() == 0
        errors = refusal(cluster, "mount", str(mounted))
    assert f"PlanError: checkpoint {mounted.as_uri()} is not the driver's on w8" in errors
    assert "next: pass a checkpoint that driver and executors share" in errors
    assert not [path for path in mounted.rglob("*") if path.is_file()]


def test_a_store_that_ignores_conditional_puts_is_refused(cluster):
    with s3_server(host=cluster.hosts.address, is_careless=True) as s3, s3.in_environment():
        errors = refusal(cluster, "careless", f"{s3.url}/careless", environment=s3.env)
        assert "PlanError" in errors and "does not keep put-if-absent" in errors
        assert open_store(f"{s3.url}/careless").list() == []
