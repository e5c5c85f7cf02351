"""Tables in PostgreSQL."""

from __future__ import annotations

import functools
import uuid
from pathlib import Path
from typing import ClassVar

import psycopg

from cairn.sinks import Postgres
from cairn.sinks.base import Sink
from cairn.sinks.postgres.sink import Mode
from tests.places.base import Place, Row
from tests.servers import postgres


@functools.cache
def shared_database() -> str:
    return postgres().new_database()


class PostgresPlace(Place):
    """A schema of its own in a database that all such places share."""

    mode: ClassVar[Mode] = "append"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.uri = self.database()
        self.schema = f"s{uuid.uuid4().hex[:12]}"
        self.outside = psycopg.connect(self.uri, autocommit=True, application_name="a reader")
        self.outside.execute(f"create schema {self.schema}")

    def database(self) -> str:
        return shared_database()

    def make(self) -> Sink:
        key = ("k",) if self.mode == "upsert" else ()
        return Postgres(self.uri, f"{self.schema}.rows", mode=self.mode, key=key, create=True)

    def rows(self, driver: Sink) -> list[Row]:
        return self._query(f"select k, s from {self.schema}.rows")

    def add_column(self, name: str) -> None:
        self.outside.execute(f"alter table {self.schema}.rows add column {name} text")

    def leftovers(self) -> list[str]:
        """Staged pieces, listed or not, what is prepared, and transactions that are open."""
        tables = self._query(
            "select c.relname from pg_class c where c.relnamespace = %s::regnamespace"
            " and c.relname like 'cairn_piece%%' and c.relkind = 'r'",
            self.schema,
        )
        listed = self._query(f"select place from {self.schema}.cairn_staged")
        prepared = self._query(
            "select gid from pg_prepared_xacts where database = current_database()"
        )
        open_ = self._query(
            "select application_name, query from pg_stat_activity"
            " where datname = current_database() and application_name like 'cairn:%'"
            " and xact_start is not null and backend_type = 'client backend'"
        )
        return [" ".join(row) for row in (*tables, *listed, *prepared, *open_)]

    def connections(self) -> list[str]:
        # A backend takes a moment to end after its client is gone.
        return self._query_until_empty(
            "select application_name from pg_stat_activity"
            " where datname = current_database() and application_name like 'cairn:%'"
        )

    def close(self) -> None:
        # Tests share the database: close everything that this one has left open.
        self._query(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = current_database() and application_name like 'cairn:%'"
        )
        ours = "select gid from pg_prepared_xacts where database = current_database()"
        for (gid,) in self._query(ours):
            self.outside.execute(f"rollback prepared '{gid}'")
        self.outside.execute(f"drop schema {self.schema} cascade")
        self.outside.close()

    def _query(self, query: str, *parameters: str) -> list[Row]:
        try:
            return self.outside.execute(query.encode(), parameters or None).fetchall()
        except psycopg.OperationalError:
            # The server was stopped and started.
            self.outside = psycopg.connect(self.uri, autocommit=True)
            return self.outside.execute(query.encode(), parameters or None).fetchall()

    def _query_until_empty(self, query: str) -> list[str]:
        for _ in range(200):
            found = [row[0] for row in self._query(query)]
            if not found:
                return []
            self.outside.execute("select pg_sleep(0.02)")
        return found


class PostgresUpsertPlace(PostgresPlace):
    mode = "upsert"
    is_keyed = True


class PostgresPreparedPlace(PostgresPlace):
    """In a database of its own: prepared transactions are of a database, not of a schema."""

    mode = "prepared"
    is_in_pieces = True

    def database(self) -> str:
        return postgres().new_database()

    def close(self) -> None:
        super().close()
        with psycopg.connect(postgres().uri, autocommit=True) as connection:
            name = psycopg.conninfo.conninfo_to_dict(self.uri)["dbname"]
            connection.execute(f"drop database {name} with (force)")
