"""A sink connects to PostgreSQL, and keeps its dsn secret."""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from cairn.errors import CommitError, EpochError, PlanError
from cairn.sinks import Postgres, SinkContext
from cairn.sinks.base import Execution
from cairn.sinks.postgres.session import session_name
from cairn.types import parse_schema
from tests.places.postgres import shared_database

SCHEMA = parse_schema("k long, s string")
SECRET = "hunter2"


def _context(scratch: str | None = None) -> SinkContext:
    return SinkContext("job", "j", "out", SCHEMA, scratch)


def _full_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(vars(error))


def _dsn_of_a_vault() -> str:
    return shared_database()


def _is_there(table: str) -> bool:
    with psycopg.connect(shared_database(), autocommit=True) as outside:
        found = outside.execute("select to_regclass(%s) is not null", [table]).fetchone()
        outside.execute(f"drop table if exists {table}".encode())
    return found == (True,)


def test_the_dsn_may_come_from_the_environment_or_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOP_DSN", shared_database())
    for dsn in ("env:SHOP_DSN", _dsn_of_a_vault):
        sink = Postgres(dsn, "by_reference", create=True)
        assert shared_database().encode() not in pickle.dumps(sink)
        sink = pickle.loads(pickle.dumps(sink))
        sink.open(_context())
        sink.close()
        assert _is_there("by_reference")


def test_without_a_dsn_libpq_looks_into_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    found = psycopg.conninfo.conninfo_to_dict(shared_database())
    for name, variable in {"host": "PGHOST", "dbname": "PGDATABASE", "user": "PGUSER"}.items():
        monkeypatch.setenv(variable, str(found[name]))
    sink = Postgres(table="by_environment", create=True)
    sink.open(_context())
    sink.close()
    assert _is_there("by_environment")


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(PlanError, match="the dsn is in the environment variable NO_SUCH_DSN"):
        Postgres("env:NO_SUCH_DSN", "t").open(_context())


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgres//me:{SECRET}@localhost/x",
        f"postgresql://me:{SECRET}@localhost:1/x",
        f"postgresql://me:{SECRET}@localhost:notaport/x",
        f"host=/nowhere password={SECRET}",
        f"password={SECRET} nonsense",
        f"postgresql://me:{SECRET}@no.such.host.invalid/x",
    ],
)
def test_a_password_is_never_full_text(dsn: str, tmp_path: Path) -> None:
    sink = Postgres(dsn, "t")
    assert SECRET not in repr(sink) and SECRET not in str(sink)
    with pytest.raises((PlanError, CommitError)) as refused:
        sink.open(_context())
    assert SECRET not in _full_text(refused.value)
    sink.open(_context(str(tmp_path)))
    with pytest.raises((PlanError, EpochError)) as refused_in_slot:
        sink.writer(2, 0, Execution())
    assert SECRET not in _full_text(refused_in_slot.value)


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    sink = Postgres("env:X", "t")
    with pytest.raises(PlanError, match=r"pip install 'cairn-state\[postgres\]'"):
        sink.open(_context())


def test_a_server_without_prepared_transactions_is_refused_for_that_mode() -> None:
    class Server:
        """One that was started as it is delivered; ours cannot be without a restart."""

        def execute(self, query: str) -> Any:
            assert query == "show max_prepared_transactions"
            return self

        def fetchone(self) -> tuple[str]:
            return ("0",)

    sink = Postgres(shared_database(), "t", mode="prepared")
    sink.context = _context()
    with pytest.raises(PlanError, match="max_prepared_transactions = 0"):
        sink._check_can_prepare(Server())  # type: ignore[arg-type]


def test_a_session_says_whose_it_is_in_63_bytes() -> None:
    name = session_name("0123456789abcdef", 10**12, "ü" * 100)
    assert name.startswith("cairn:0123456789abcdef:1000000000000:üü")
    assert len(name.encode()) <= 63


def test_a_commit_is_durable_whatever_the_role_has_set() -> None:
    uri = shared_database()
    with psycopg.connect(uri, autocommit=True) as outside:
        outside.execute("drop role if exists careless; create role careless superuser login")
        outside.execute("alter role careless set synchronous_commit = off")
        outside.execute("alter role careless set statement_timeout = '1s'")
        outside.execute("alter role careless set default_transaction_isolation = 'serializable'")
    sink = Postgres(uri.replace("//postgres:@", "//careless:@"), "durable", create=True)
    sink.open(_context())
    connection = sink._sessions.take()
    for setting, value in {
        "synchronous_commit": "on",
        "statement_timeout": "0",
        "transaction_isolation": "read committed",
        "lock_timeout": "10s",
    }.items():
        assert connection.execute(f"show {setting}".encode()).fetchone() == (value,)
    sink.close()


def test_a_closed_sink_can_be_opened_again() -> None:
    sink = Postgres(shared_database(), "again", create=True)
    for epoch in (2, 3):
        sink.open(_context())
        writer = sink.writer(epoch, 0, Execution())
        writer.write(pa.RecordBatch.from_pydict({"k": [epoch], "s": ["x"]}, SCHEMA))
        sink.commit(epoch, [writer.prepare()])  # type: ignore[list-item]
        sink.recover(epoch + 1)
        sink.close()
    sink.close()
    with psycopg.connect(shared_database()) as outside:
        assert outside.execute("select k from again order by k").fetchall() == [(2,), (3,)]
        outside.execute("drop table again")


def test_an_unreachable_server_fails_a_commit_with_its_reason(tmp_path: Path) -> None:
    sink = Postgres(shared_database(), "reachable", create=True)
    sink.open(_context())
    sink.close()
    sink._sessions._dsn = f"host={tmp_path} dbname=x password={SECRET}"
    with pytest.raises(CommitError, match="could not publish epoch 2") as failed:
        sink.commit(2, [{"pass": 0, "subtask": 0, "digest": "d", "rows": 1}])
    assert SECRET not in _full_text(failed.value)
