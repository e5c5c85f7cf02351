"""SQL in a process of its own: what it answers, and what it cannot take from ours."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import cairn.query.sql_apart as module
from cairn.errors import QueryError, StaleEpochError
from cairn.query.sql import is_truncated
from cairn.query.sql_apart import child_environment, run_sql_apart
from cairn.snapshots.tables import StateSource, open_state
from cairn.storage.store import open_store
from tests.unit.snapshots.checkpoints import Checkpoint, value


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateSource]:
    store = open_store(str(tmp_path_factory.mktemp("ckpt")))
    made = Checkpoint({"n": value("bigint"), "seen": value("timestamp")}, store=store)
    made.commit(
        {"n": {k: k for k in range(100)}, "seen": {1: dt.datetime(2024, 1, 31, tzinfo=dt.UTC)}}
    )
    with open_state(made.store) as opened:
        yield opened


def ask(source: StateSource, sql: str, rows_max: int = 100, timeout_s: float = 60) -> pa.Table:
    return run_sql_apart(source, sql, rows_max=rows_max, timeout_s=timeout_s)


def test_a_query_gives_the_rows_and_types_it_gives_here(source: StateSource) -> None:
    few = ask(source, "select k, value from n order by value", rows_max=2)
    assert few.to_pydict() == {"k": [0, 1], "value": [0, 1]} and is_truncated(few)
    found = ask(source, "select value from seen")
    assert found.schema.types == [pa.timestamp("us", "UTC")] and not is_truncated(found)


@pytest.mark.parametrize(
    "sql",
    [
        "select length(repeat('x', 3000000000))",
        "select len(range(300000000))",
        "select repeat('x', 1000000) from range(40)",
        "select list(range % 2 = 0) from range(5000000)",
    ],
    ids=["one long text", "one long list", "many long texts", "many small values"],
)
def test_values_that_duckdb_does_not_count_are_bounded(source: StateSource, sql: str) -> None:
    with pytest.raises(QueryError, match=r"MiB|more than \d+ values"):
        ask(source, sql)


@pytest.mark.parametrize(
    "sql",
    [
        "select levenshtein(repeat('a', 1000000), repeat('b', 1000000))",
        "select a" + ".a" * 40_000,
    ],
    ids=["one slow function", "slow to bind"],
)
def test_time_that_duckdb_cannot_be_interrupted_in_is_bounded(
    source: StateSource, sql: str
) -> None:
    with pytest.raises(QueryError, match=r"longer than 0\.1 s"):
        ask(source, sql, timeout_s=0.1)


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.kill(os.getpid(), 11)",
        "import os; os.abort()",
        "raise SystemExit(3)",
        "pass",
    ],
)
def test_a_query_that_ends_its_process_is_refused(
    source: StateSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    played(program, monkeypatch, tmp_path)
    with pytest.raises(QueryError, match=r"ended the process it ran in[\s\S]*next:"):
        ask(source, "select 1")


def test_a_process_that_answers_too_much_or_not_at_all_is_ended(
    source: StateSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played("import os\nwhile True: os.write(1, b'x' * 65536)", monkeypatch, tmp_path)
    with pytest.raises(QueryError, match="more than 16 MiB"):
        ask(source, "select 1")
    played("import time; time.sleep(600)", monkeypatch, tmp_path)
    monkeypatch.setattr(module, "_START_S_MAX", 0.5)
    with pytest.raises(QueryError, match="took longer"):
        ask(source, "select 1", timeout_s=0.1)


def test_a_process_that_cannot_start_is_no_fault_of_the_query(
    source: StateSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played("import no_such_module", monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match="no_such_module"):
        ask(source, "select 1")


def played(program: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another program in place of the one that runs queries."""
    (folder / "cairn_played.py").write_text(program)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(module, "_MODULE", "cairn_played")


def test_an_epoch_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    made = Checkpoint({"n": value("bigint")}, keep=1, store=open_store(str(tmp_path)))
    made.commit({"n": {1: 1}})
    with open_state(made.store, hold_ms=0) as source:
        for number in range(30):
            made.commit({"n": {1: number}}, base=True)
            made.collector.after_epoch()
        with pytest.raises(StaleEpochError, match="is retired"):
            ask(source, "select * from n")


def test_the_process_knows_how_to_reach_stores_and_no_other_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "for the store")
    monkeypatch.setenv("https_proxy", "http://proxy")
    monkeypatch.setenv("DATABASE_PASSWORD", "not for it")
    found = child_environment()
    assert found["AWS_SECRET_ACCESS_KEY"] == "for the store" and found["https_proxy"]
    assert "DATABASE_PASSWORD" not in found
    assert all(found["PYTHONPATH"].split(os.pathsep)), "not the folder it runs in"


def test_the_process_has_its_limits_before_it_looks_at_the_query(tmp_path: Path) -> None:
    program = """
import os, resource, signal, sys
import cairn.query.sql_child as child
asked = dict(url="", epoch=1, sql="", rows_max=1, timeout_s=9, memory_mb=64, bytes_max=1)
child._limit(child.Asked(**asked))
limits = [resource.getrlimit(each)[1] for each in (resource.RLIMIT_CPU, resource.RLIMIT_CORE)]
alarm = signal.getitimer(signal.ITIMER_REAL)[0]
try:
    bytes(2 << 30)
except MemoryError:
    print(limits, 5 < alarm <= 10, os.nice(0) >= child.NICE)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=child_environment()
    )
    assert done.stdout.split("\n")[0] == "[23, 0] True True", done.stderr
