"""SQL over states: what it answers, and all that it must not do."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import QueryError, StaleEpochError
from cairn.query.json_values import json_columns, json_rows
from cairn.query.sql import is_truncated, run_sql
from cairn.snapshots.tables import StateSource, StateTable, open_state
from tests.unit.snapshots.checkpoints import UID, Checkpoint, listed, mapped, value

STATES = {
    "n": value("bigint"),
    "items": listed("string"),
    "last": mapped("string", "double"),
    "seen": value("timestamp"),
    "price": value("decimal(10,2)"),
    "nested": value("struct<a:int,b:array<string>,m:map<string,int>>"),
    "o": value("object"),
    "timers.event": mapped("bigint", "boolean"),
    "Total": value("int"),
    "total": value("int"),
}
NOON = dt.datetime(2024, 1, 31, 12, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def source() -> Iterator[StateSource]:
    made = Checkpoint(STATES, {"user": "string", "value": "bigint"})
    made.commit(
        {
            "n": {(f"u{k % 3}", k): k for k in range(100)},
            "items": {("a", 1): ["x", "y"]},
            "last": {("a", 1): {"e": 0.5, "f": float("nan")}},
            "seen": {("a", 1): NOON},
            "price": {("a", 1): Decimal("1.50")},
            "nested": {("a", 1): (1, ["x", None], {"q": 2})},
            "o": {("a", 1): {1}},
            "timers.event": {("a", 1): {5000: True}},
            "Total": {("a", 1): 1},
            "total": {("a", 1): 2},
        }
    )
    with open_state(made.store) as opened:
        yield opened


def ask(source: StateSource, sql: str, **more: Any) -> Any:
    return run_sql(source, sql, **{"rows_max": 1000, "timeout_s": 60, **more})


def rows(source: StateSource, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in json_rows(ask(source, sql))]


@pytest.mark.parametrize("name", ["count.n", '"count.n"', "count_n", "n", "COUNT.N"])
def test_a_state_is_a_table_by_each_of_its_names(source: StateSource, name: str) -> None:
    assert rows(source, f"select count(*), max(value) from {name}") == [(100, 99)]


@pytest.mark.parametrize(
    "sql, expected",
    [
        ("select user, count(*) from n group by 1 order by 1 limit 2", [("u0", 34), ("u1", 33)]),
        ("select position, value from items order by 1", [(0, "x"), (1, "y")]),
        ("select entry, value from last order by 1", [("e", 0.5), ("f", "NaN")]),
        ("select value from seen", [("2024-01-31T12:00:00Z",)]),
        ("select date_trunc('day', value) from seen", [("2024-01-31T00:00:00Z",)]),
        ("select value * 2 from price", [("3.00",)]),
        ("select value.a, value.b[1], value.m['q'] from nested", [(1, "x", 2)]),
        ("select value from nested", [({"a": 1, "b": ["x", None], "m": [["q", 2]]},)]),
        ('select time from "count.timers.event"', [("1970-01-01T00:00:05Z",)]),
        ("select time from count_timers_event", [("1970-01-01T00:00:05Z",)]),
        ("with q as (from n) select count(*) from q a join q b using (key_value)", [(100,)]),
        ("select count(*) from n a join n b using (key_value)", [(100,)]),
        ("select count(*) from n where value in (select value + 1 from n)", [(99,)]),
        ("select 1::utinyint, 1::hugeint, null, time '10:00'", [(1, "1", None, "10:00:00.000000")]),
        ("from range(2)", [(0,), (1,)]),
        ("with recursive r as (select 1 a union all select a + 1 from r where a < 3) "
         "select max(a) from r", [(3,)]),
        ("pivot (select user, value from n where value < 2) on user in ('u0', 'u1') "
         "using sum(value)", [("0", "1")]),
        ("select 1 -- a remark", [(1,)]),
    ],
)  # fmt: skip
def test_a_query_gives_its_rows(source: StateSource, sql: str, expected: Any) -> None:
    assert rows(source, sql) == expected


def test_columns_have_types_that_cairn_has_names_for(source: StateSource) -> None:
    found = ask(source, "select count(*) n, sum(value) s, 1::uint64 u, 'x'::blob b, [1] l from n")
    told = {column["name"]: column["type"] for column in json_columns(found.schema)}
    assert told == {
        "n": "bigint",
        "s": "decimal(38,0)",
        "u": "decimal(20,0)",
        "b": "binary",
        "l": "array<int>",
    }
    assert len(set(ask(source, "select 1 a, 2 a, 3 A").column_names)) == 3


def test_rows_are_limited_and_it_is_told_that_there_were_more(source: StateSource) -> None:
    few = ask(source, "select * from n order by value", rows_max=3)
    assert few["value"].to_pylist() == [0, 1, 2] and is_truncated(few)
    all_ = ask(source, "select * from n", rows_max=100)
    assert all_.num_rows == 100 and not is_truncated(all_)
    assert is_truncated(ask(source, "select * from n", rows_max=0))


def test_only_states_that_a_query_names_are_read(
    source: StateSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    batches = StateTable.batches

    def spy(self: StateTable, *args: Any, **more: Any) -> Any:
        read.append(self.state)
        return batches(self, *args, **more)

    monkeypatch.setattr(StateTable, "batches", spy)
    ask(source, "select count(*) from n /* items */ where user <> 'last'")
    assert read == ["n"]


def test_states_whose_names_differ_by_case_only_are_not_mixed_up(source: StateSource) -> None:
    with pytest.raises(QueryError, match="no state has the name 'total'"):
        ask(source, "select * from total")
    with pytest.raises(QueryError, match=r"count\.Total_1[\s\S]*count\.total_2"):
        ask(source, "select * from count.total")
    assert rows(source, "select value from count.total_1") == [(1,)]
    assert rows(source, 'select value from "count.total_2"') == [(2,)]


def test_numbers_that_tell_states_apart_are_no_other_states_name() -> None:
    made = Checkpoint({"a": value("int"), "A": value("int"), "a_1": value("int")})
    made.commit({"a": {1: 1}, "A": {1: 2}, "a_1": {1: 3}})
    with open_state(made.store) as opened:
        assert rows(opened, "select value from count.a_1") == [(3,)]
        assert rows(opened, "select value from count.a_2") == [(1,)]
        assert rows(opened, "select value from count.a_3") == [(2,)]


@pytest.mark.parametrize("uid", ["memory", "temp", "pg_catalog", "information_schema", "main"])
def test_an_operator_with_a_name_of_duckdbs_own_can_be_asked(uid: str) -> None:
    made = Checkpoint({"n": value("int")}, uid=uid)
    made.commit({"n": {1: 7}})
    with open_state(made.store) as opened:
        assert rows(opened, f'select value from "{uid}.n"') == [(7,)]
        if uid == "main":
            assert rows(opened, "select value from main.n") == [(7,)]
        else:
            with pytest.raises(QueryError, match=f'next: write both parts in .*"{uid}.n"'):
                ask(opened, f"select value from {uid}.n")


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("pivot n on user using sum(value)", r"ON column IN \(\.\.\.\)"),
        ("select 340282366920938463463374607431768211455::uhugeint", "cast it to varchar"),
        ("with x as (insert into n values (1) returning *) from x", "found: INSERT"),
        ("with x as (delete from n returning *) from x", "found: DELETE"),
    ],
)
def test_what_cannot_be_answered_is_told_by_what_it_is(
    source: StateSource, sql: str, told: str
) -> None:
    with pytest.raises(QueryError, match=told):
        ask(source, sql)


FORBIDDEN = [
    "select * from read_csv('/etc/passwd')",
    "select * from read_csv_auto('/etc/passwd')",
    "select * from read_text('/etc/passwd')",
    "select * from read_blob('/etc/passwd')",
    "select * from read_parquet('s3://x/y')",
    "select * from read_json('https://example.com/x.json')",
    "select * from '/etc/passwd'",
    "select * from 'x.csv'",
    "select * from \"https://example.com/x.csv\"",
    "from glob('/*')",
    "select * from n, lateral (select * from glob('/' || user))",
    "select (select content from read_text('/etc/passwd'))",
    "with x as (select * from read_csv('/etc/passwd')) select * from x",
    "select getenv('HOME')",
    "select current_setting('temp_directory')",
    "from duckdb_settings()",
    "select * from duckdb_settings",
    "summarize duckdb_settings",
    "with duckdb_views as (select 1) select * from duckdb_views",
    "select * from information_schema.tables",
    "select * from pg_catalog.pg_class",
    "select * from main.sqlite_master",
    "from duckdb_secrets()",
    "from duckdb_extensions()",
    "from query('select 1')",
    "from query_table('n')",
    "from sniff_csv('/etc/passwd')",
    "from parquet_metadata('x')",
    "from arrow_scan(1, 2, 3)",
    "from python_map_function()",
    "copy n to '/tmp/out'",
    "copy (select 1) to '/tmp/out.parquet'",
    "export database '/tmp/x'",
    "attach '/tmp/x.db'",
    "install httpfs",
    "load httpfs",
    "set memory_limit = '100GB'",
    "reset memory_limit",
    "set enable_external_access = true",
    "pragma database_list",
    "call pragma_version()",
    "create table x (a int)",
    "create macro f(a) as a",
    "create secret (type s3)",
    "drop view n",
    "delete from n",
    "insert into n values (1)",
    "update n set value = 1",
    "begin transaction",
    "checkpoint",
    "vacuum",
    "explain analyze select * from n",
    "prepare p as select 1",
    "execute p",
    "use memory",
    "show tables",
    "show threads",
    "select 1; select 2",
    "select 1; drop table n",
    "",
    ";",
    "selec",
    "select * from n where",
    "select nothing from n",
    "select * from nothing",
    "select * from other.catalog.n",
    "select * from source",
    "select 'x'::int from n",
    "select $1",
    "select '\ud800'",
    "select 1 \x00",
    "select ?",
    "select * from n limit 'x'",
    "select " + "(" * 3000 + "1" + ")" * 3000,
    "select 1 -- " + "x" * 200_000,
    "select * from (" * 600 + "select 1" + ")" * 600,
]  # fmt: skip


@pytest.mark.parametrize("sql", FORBIDDEN, ids=[sql[:50] for sql in FORBIDDEN])
def test_whatever_is_no_plain_query_over_states_is_refused(source: StateSource, sql: str) -> None:
    with pytest.raises(QueryError) as refused:
        ask(source, sql)
    assert "root:" not in str(refused.value)


def test_nothing_is_written_by_a_refused_copy(source: StateSource, tmp_path: Path) -> None:
    with pytest.raises(QueryError):
        ask(source, f"copy (select 1) to '{tmp_path}/out.csv'")
    assert not list(tmp_path.iterdir())


def test_duckdb_itself_reaches_no_file_once_a_query_runs(
    source: StateSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if what a query names were not looked at.
    import cairn.query.sql as module

    monkeypatch.setattr(module, "_TABLE_FUNCTIONS", frozenset({"read_text", "glob", "read_csv"}))
    for sql in ("from read_text('/etc/passwd')", "from glob('/etc/*')", "from read_csv('/etc/x')"):
        with pytest.raises(QueryError) as refused:
            ask(source, sql)
        assert "disabled by configuration" in str(refused.value)


def test_a_query_that_takes_too_long_is_ended(source: StateSource) -> None:
    with pytest.raises(QueryError, match=r"longer than 0\.2 s"):
        ask(source, "select count(*) from range(100000000000) a, range(1000) b", timeout_s=0.2)


def test_a_query_that_needs_too_much_memory_is_refused(source: StateSource) -> None:
    with pytest.raises(QueryError, match="more than 64 MiB"):
        ask(source, "select list(range) from range(500000000)", memory_mb=64)
    with pytest.raises(QueryError, match=r"more than 64 MiB|memory"):
        ask(
            source,
            "select repeat('x', 1000000) from range(1000)",
            memory_mb=64,
        )


def test_an_error_while_a_state_is_read_is_told_in_its_own_words(
    source: StateSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(self: StateTable, *args: Any, **more: Any) -> Any:
        raise StaleEpochError("epoch 3 is retired\n  next: `cairn ls`")
        yield

    monkeypatch.setattr(StateTable, "batches", stale)
    with pytest.raises(StaleEpochError, match="epoch 3 is retired"):
        ask(source, "select * from n")


def test_an_epoch_without_rows_gives_none(tmp_path: Path) -> None:
    made = Checkpoint({"n": value("bigint")})
    made.commit({})
    with open_state(made.store) as empty:
        assert ask(empty, "select * from n").num_rows == 0
        assert ask(empty, "select * from n").column_names == ["key_group", "k", "value"]
        assert ask(empty, f"select count(*) c from {UID}.n")["c"].to_pylist() == [0]


def test_duckdb_is_not_loaded_before_it_is_asked() -> None:
    program = "import sys, cairn, cairn.query.sql, cairn.cli.state; print('duckdb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_query_whose_state_is_read_too_slowly_gives_no_half_an_answer(
    source: StateSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = StateTable.batches

    def slow(self: StateTable, *args: Any, **more: Any) -> Any:
        for batch in batches(self, *args, **more):
            for at in range(batch.num_rows):
                yield batch.slice(at, 1)
                time.sleep(0.02)

    monkeypatch.setattr(StateTable, "batches", slow)
    with pytest.raises(QueryError, match="took longer"):
        ask(source, "select count(*) from n", timeout_s=0.3)
