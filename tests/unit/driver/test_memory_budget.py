"""The memory of slots, from the settings of Spark."""

from __future__ import annotations

import pytest

from cairn.driver.memory_budget import find_budget, overhead_mb, parse_mb
from cairn.errors import PlanError

YARN = {"spark.master": "yarn", "spark.executor.cores": "4"}


def test_slots_share_the_overhead_of_an_executor() -> None:
    budget = find_budget(None, {**YARN, "spark.executor.memoryOverhead": "8g"}, parallelism=16)
    assert budget == (2048, 4, 0)
    assert budget.text == "slots may use 2,048 MiB each: 8,192 MiB beside an executor"


def test_fewer_subtasks_than_cores_have_more_each() -> None:
    budget = find_budget(None, {**YARN, "spark.executor.memoryOverhead": "8g"}, parallelism=2)
    assert budget == (4096, 2, 0)
    by_two = {**YARN, "spark.executor.memoryOverhead": "8g", "spark.task.cpus": "2"}
    assert find_budget(None, by_two, parallelism=16) == (4096, 2, 0)


def test_overhead_without_a_setting_is_that_of_spark() -> None:
    assert overhead_mb({}) == 384
    assert overhead_mb({"spark.executor.memory": "20g"}) == 2048
    factor = {"spark.executor.memory": "10g", "spark.executor.memoryOverheadFactor": "0.4"}
    assert overhead_mb(factor) == 4096


def test_a_given_memory_counts_on_every_master() -> None:
    assert find_budget(512, YARN, parallelism=16) == (512, 4, 0)
    assert find_budget(512, {"spark.master": "local[2]"}, parallelism=3) == (512, 3, 0)
    assert find_budget(512, {"spark.master": "spark://host:7077"}, parallelism=3) == (512, 1, 0)


@pytest.mark.parametrize("master", ["local[4]", "spark://host:7077"])
def test_without_containers_there_is_no_limit_by_default(master: str) -> None:
    assert find_budget(None, {"spark.master": master}, parallelism=4) is None


def test_a_cap_of_pythons_address_space_is_refused() -> None:
    with pytest.raises(PlanError, match=r"pyspark.memory is 2g: slots inherit(?s:.*)next: unset"):
        find_budget(None, {**YARN, "spark.executor.pyspark.memory": "2g"}, parallelism=1)


def test_too_little_memory_for_a_process_is_refused() -> None:
    with pytest.raises(PlanError, match="at least 64, found 10"):
        find_budget(10, YARN, parallelism=1)


@pytest.mark.parametrize(
    ("text", "mb"), [("2g", 2048), ("512", 512), ("512m", 512), ("1048576k", 1024), ("1gb", 1024)]
)
def test_sizes_are_read_as_spark_reads_them(text: str, mb: int) -> None:
    assert parse_mb(text) == mb


def test_the_jvm_of_hadoops_client_takes_its_part_of_the_overhead() -> None:
    yarn = {**YARN, "spark.executor.memoryOverhead": "4g"}
    budget = find_budget(None, yarn, parallelism=16, jvm_mb=256)
    assert budget is not None and budget.slot_mb == (4096 - 256) // 4
    assert budget.text == (
        "slots may use 960 MiB each, and Hadoop's client 256 MiB: 4,096 MiB beside an executor"
    )
    given = find_budget(512, yarn, parallelism=16, jvm_mb=256)
    assert given is not None and given.slot_mb == 512 and "2,304 MiB beside" in given.text
