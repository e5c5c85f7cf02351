"""The collector of the JVM that `cairn.session` starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.driver.class_archive import JVM_VARIABLES
from cairn.driver.spark_start import choose_collector

OPTIONS = "spark.driver.extraJavaOptions"


@pytest.fixture(autouse=True)
def no_options_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in JVM_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))


def test_the_parallel_collector_is_added_to_the_options_given() -> None:
    assert choose_collector({OPTIONS: "-Xss8m"}) == "-Xss8m -XX:+UseParallelGC"
    assert choose_collector({}) == "-XX:+UseParallelGC"


@pytest.mark.parametrize("setting", [OPTIONS, "spark.driver.defaultJavaOptions"])
def test_a_collector_in_the_settings_stays_the_only_one(setting: str) -> None:
    settings = {OPTIONS: "-Xss8m"} | {setting: "-Xss8m -XX:+UseZGC"}
    assert choose_collector(settings) == settings[OPTIONS]


@pytest.mark.parametrize("name", JVM_VARIABLES)
def test_a_collector_in_the_environment_stays_the_only_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "-Xmx1g -XX:+UseSerialGC")
    assert choose_collector({OPTIONS: "-Xss8m"}) == "-Xss8m"


def test_a_collector_in_spark_defaults_stays_the_only_one(tmp_path: Path) -> None:
    defaults = "spark.driver.defaultJavaOptions  -XX:+UseG1GC\n"
    (tmp_path / "spark-defaults.conf").write_text(defaults)
    assert choose_collector({OPTIONS: "-Xss8m"}) == "-Xss8m"


def test_options_that_only_mention_collection_are_not_a_collector() -> None:
    assert "UseParallelGC" in choose_collector({OPTIONS: "-XX:ParallelGCThreads=2 -Xlog:gc"})
