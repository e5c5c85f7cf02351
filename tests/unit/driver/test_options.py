"""Options of `job.start` that are wrong are refused by name, before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn import Job, sinks
from cairn.driver.options import BACKEND_MEMORY_MB_MIN, Options, check_options
from cairn.driver.spark_config import spark_config
from cairn.errors import PlanError
from cairn.plan.graph import Graph, SourceNode
from tests.unit.plan.programs import process, source

GROUPS = 16
CORES = 4


def interval_of(trigger: str) -> Any:
    """Spark's reading of a trigger, as far as these tests go."""
    number, unit = trigger.split()
    return SimpleNamespace(intervalMs=lambda: int(number) * {"second": 1000}[unit.rstrip("s")])


class FakeSpark:
    """A session as far as options are checked against it."""

    def __init__(self, master: str = "local[4]", **settings: str) -> None:
        settings = {**spark_config(), **settings}
        conf = SimpleNamespace(getAll=settings.items)
        self.sparkContext = SimpleNamespace(
            getConf=lambda: conf, master=master, defaultParallelism=CORES
        )
        trigger = SimpleNamespace(ProcessingTime=interval_of)
        self._jvm: Any = SimpleNamespace()
        self._jvm.org = SimpleNamespace(
            apache=SimpleNamespace(
                spark=SimpleNamespace(
                    sql=SimpleNamespace(streaming=SimpleNamespace(Trigger=trigger))
                )
            )
        )


def graph_of(**source_options: Any) -> Graph:
    job = Job("j", max_parallelism=GROUPS)
    rows = source(job, "rows")
    node = job._nodes["rows"]
    assert isinstance(node, SourceNode)
    job._nodes["rows"] = replace(node, **source_options)
    process(rows, "a").sink_to(sinks.Noop(), uid="out")
    return job.graph()


def check(folder: Path, spark: FakeSpark | None = None, **options: Any) -> int:
    graph = graph_of(**options.pop("source", {}))
    checkpoint = options.pop("checkpoint", str(folder / "checkpoint"))
    session: Any = spark or FakeSpark()
    return check_options(graph, Options(checkpoint, **options), session)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "floppy"}, "no backend 'floppy'\n  expected: heap, rocksdb, the URL"),
        (
            {"backend_memory_mb": BACKEND_MEMORY_MB_MIN - 1},
            "backend_memory_mb must be at least 16, found 15",
        ),
        ({"on_stop": "delete", "ha": "store:"}, "would go on with a checkpoint that is gone"),
        ({"reset_sources": ("rows",), "ha": "store:"}, "read 'rows' from the beginning again"),
        ({"on_stop": "burn"}, "on_stop must be 'retain' or 'delete', found 'burn'"),
        ({"standby": "cold"}, "standby must be 'warm' or 'hot', found 'cold'"),
        ({"standby": "hot"}, "standby='hot' is for a driver of a group"),
        ({"guarantee": "once"}, "no guarantee 'once'\n  found: exactly-once"),
        ({"checkpoint_every": 0}, "checkpoint_every must be between 1 and"),
        ({"commit_timeout": "soon"}, "commit_timeout must be a span of time, found 'soon'"),
        ({"commit_timeout": "-1 hour"}, "commit_timeout must not be negative"),
        (
            {"checkpoint_every": 2, "source": {"replayable": False}},
            "source 'rows' does not go with checkpoint_every",
        ),
        ({"on_error": "ignore"}, "on_error must be 'fail' or 'dead-letter', found 'ignore'"),
        ({"trigger": "often"}, "trigger 'often' is not an interval"),
        ({"trigger": "1 fortnight"}, "trigger '1 fortnight' is not an interval"),
        ({"drain": True}, "drain=True needs an input that ends, found trigger '1 second'"),
        ({"retained_epochs": 0}, "retained_epochs must be at least 1, found 0"),
        ({"retained_for": "a while"}, "retained_for must be a span of time"),
        (
            {"reset_sources": ("rows", "clicks")},
            "reset_sources names 'clicks', which is not a source of the job\n  found: rows",
        ),
        ({"parallelism": 0}, "parallelism must be between 1 and max_parallelism (16), found 0"),
        ({"parallelism": GROUPS + 1}, "max_parallelism (16), found 17"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as raised:
        check(tmp_path, **options)
    assert message in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spark", "options", "message"),
    [
        (FakeSpark(**{"spark.speculation": "true"}), {}, "spark.speculation is on"),
        (FakeSpark("yarn"), {"checkpoint": "memory:name"}, "which executors of 'yarn' may not see"),
    ],
)
def test_options_that_do_not_go_with_the_session_are_refused(
    tmp_path: Path, spark: FakeSpark, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as raised:
        check(tmp_path, spark, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "rocksdb", "backend_memory_mb": BACKEND_MEMORY_MB_MIN},
        {"trigger": "available-now", "drain": True},
        {"trigger": "0 seconds"},
        {"checkpoint_every": 2, "guarantee": "at-most-once", "source": {"replayable": False}},
        {"retained_epochs": 1, "retained_for": "7 days", "commit_timeout": "0 seconds"},
        {"reset_sources": ("rows",)},
        {"checkpoint": "memory:name"},
    ],
    ids="+".join,
)
def test_options_at_their_limits_are_taken(tmp_path: Path, options: dict[str, Any]) -> None:
    assert check(tmp_path, **options) == CORES


def test_parallelism_is_the_cores_but_at_most_the_key_groups(tmp_path: Path) -> None:
    spark = FakeSpark()
    spark.sparkContext.defaultParallelism = 100
    assert check(tmp_path, spark) == GROUPS
    assert check(tmp_path, spark, parallelism=3) == 3
