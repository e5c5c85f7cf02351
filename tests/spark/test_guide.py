"""The pages of the documentation that need Spark: their programs run, and do what they say.

See tests/docs/pages.py for how; what a page assumes and what must come out of it is in the page.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import deltalake
import psycopg
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from cairn import sinks
from tests.docs.pages import Page, pages, working_in
from tests.servers import postgres
from tests.servers import redis as redis_server
from tests.spark.support import Input

SINKS = "guide/sinks.md"
PAGES = [page for page in map(Page, pages()) if page.needs_spark and page.name != SINKS]


class Feeds:
    """`feed(spark, schema, *rows)`: a streaming DataFrame; `feed.more(*rows)`: of the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def __call__(self, spark: SparkSession, schema: str, *rows: Any) -> Any:
        self._last = Input(self._folder / f"input-{next(self._numbers)}", schema).add(*rows)
        return self._last.stream(spark)

    def more(self, *rows: Any) -> None:
        self._last.add(*rows)


@pytest.mark.parametrize("document", PAGES, ids=lambda document: document.name)
def test_the_programs_of_a_page_run(document: Page, spark: SparkSession, tmp_path: Path) -> None:
    with working_in(tmp_path):
        document.run({"spark": spark, "feed": Feeds(tmp_path)})


def test_the_programs_of_the_guide_to_sinks_write_to_every_sink(
    spark: SparkSession, tmp_path: Path
) -> None:
    database, redis = postgres().new_database(), redis_server()
    names: dict[str, Any] = {"spark": spark, "feed": Feeds(tmp_path)}
    replace = {
        # The executors' environment is that of the session, which was there before.
        "env:PGURL": database,
        "env:REDIS_URL": f"unix://{redis.socket_file}",
        # And so is the folder that Spark takes paths to be in.
        '"lake/': f'"{tmp_path}/lake/',
    }
    with working_in(tmp_path):
        Page(SINKS).run(names, replace)

    assert {path.parent.name for path in (tmp_path / "lake/payments").rglob("*.parquet")} == {
        "country=de", "country=fr",
    }  # fmt: skip
    small = sinks.list_published(str(tmp_path / "lake/small"))
    assert sum(pq.read_table(file).num_rows for file in small) == 3
    assert spark.read.parquet(str(tmp_path / "lake/small")).count() == 3
    assert spark.read.json(str(tmp_path / "lake/json")).count() == 3
    assert spark.read.json(str(tmp_path / "lake/spark")).count() == 3
    assert spark.read.parquet(str(tmp_path / "lake/by-epoch/2")).count() == 3
    with psycopg.connect(database) as connection:
        assert connection.execute("select count(*) from payments").fetchone() == (3,)
        latest = connection.execute("select account, amount from latest order by 1").fetchall()
        assert latest == [(1, 7.0), (2, 1.0)]
    assert deltalake.DeltaTable(str(tmp_path / "lake/delta")).to_pyarrow_table().num_rows == 3
    assert deltalake.DeltaTable(str(tmp_path / "lake/latest")).to_pyarrow_table().num_rows == 2
    assert redis.hget("account:1", "amount") == b"7"
    assert sorted(names["seen"]) == [1, 1, 2]
