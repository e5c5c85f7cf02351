"""Send a subtask's rows to PostgreSQL as they come, and make them durable in `prepare`.

    staged     COPY into a new table, which is listed when it is complete
    prepared   COPY into the target itself, in a transaction that waits to be committed

Always true here:
- equal rows of one place are kept once, also if two writers send them at the same time: staged
  rows once for all attempts, prepared rows once for each attempt;
- a writer that has failed accepts no more rows, and prepares nothing;
- rows that are not prepared are in an open transaction, and end with it;
- nothing that another attempt may have prepared is undone, except lower attempts at the same
  batch: the driver has abandoned those, or this one would not have begun.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from cairn.errors import EpochError
from cairn.sinks.base import Committable, Execution, Writer
from cairn.sinks.postgres.binary import HEADER, NUMBER_FORM, TRAILER, binary_rows, find_forms
from cairn.sinks.postgres.copy import csv_rows
from cairn.sinks.postgres.ledger import POSITION, Ledger, literal, ordinal
from cairn.sinks.postgres.session import Sessions, session_name
from cairn.sinks.postgres.table import Table, quote, quote_list

if TYPE_CHECKING:
    from psycopg import Connection


class CopyWriter(Writer):
    """Sends rows by COPY in its own transaction."""

    def __init__(
        self, sessions: Sessions, ledger: Ledger, table: Table, epoch: int, subtask: int,
        execution: Execution, *, schema: pa.Schema,
    ) -> None:  # fmt: skip
        self._sessions = sessions
        self._ledger = ledger
        self._table = table
        self._epoch = epoch
        self._subtask = subtask
        self._ordinal = ordinal(execution)
        self._attempt = execution.attempt
        self._schema = schema
        self._forms = find_forms(schema, table.types)
        self._format = "csv" if self._forms is None else "binary"
        self._rows = 0
        self._hash = xxhash.xxh3_128()
        self._connection: Connection[Any] | None = None
        self._copying: Any = None
        self._is_over = False

    # Hooks of subclasses

    def _clear(self, connection: Connection[Any]) -> None:
        """Remove obstacles; called before the transaction."""

    @abstractmethod
    def _begin(self, connection: Connection[Any]) -> str:
        """Return the target of COPY, with its columns; called in the transaction, before rows."""

    @abstractmethod
    def _end(self, connection: Connection[Any], digest: str) -> Committable:
        """Make the rows durable and end the transaction; called after the last row."""

    def _encode(self, batch: pa.RecordBatch) -> bytes:
        return csv_rows(batch) if self._forms is None else binary_rows(batch, self._forms)

    # Shared by subclasses

    def write(self, batch: pa.RecordBatch) -> None:
        self._check_is_open()
        if not batch.num_rows:
            return
        try:
            data = self._encode(batch)
            if self._copying is None:
                self._start()
            self._hash.update(data)
            self._copy.write(data)
        except BaseException as error:
            self._fail(error)
            raise
        self._rows += batch.num_rows

    def _check_is_open(self) -> None:
        if self._is_over:
            raise EpochError(
                f"sink {self._ledger.context.uid!r}: this attempt at epoch {self._epoch} has "
                "failed or was abandoned, and accepts no more rows"
            )

    def _start(self) -> None:
        uid, job_name = self._ledger.context.uid, self._ledger.context.job_name
        self._connection = self._sessions.take()
        name = session_name(self._ledger.key, self._epoch, f"{job_name}/{uid}")
        self._clear(self._connection)
        self._connection.execute(f"begin; set local application_name = {literal(name)}".encode())
        target = self._begin(self._connection)
        self._copying = self._connection.cursor().copy(f"copy {target}".encode())
        self._copy = self._copying.__enter__()
        if self._forms is not None:
            self._copy.write(HEADER)

    def prepare(self) -> Committable | None:
        self._check_is_open()
        if self._copying is None:
            return None
        assert self._connection is not None
        try:
            if self._forms is not None:
                self._copy.write(TRAILER)
            copying, self._copying = self._copying, None
            copying.__exit__(None, None, None)
            committable = self._end(self._connection, self._hash.hexdigest())
        except BaseException as error:
            self._fail(error)
            raise
        connection, self._connection = self._connection, None
        self._sessions.give(connection)
        return committable

    def abort(self) -> None:
        self._give_up()

    def _give_up(self) -> None:
        """Roll the transaction back, or close the connection, so that the server does."""
        self._is_over = True
        connection, self._connection = self._connection, None
        copying, self._copying = self._copying, None
        if connection is None:
            return
        try:
            if copying is not None:
                reason = InterruptedError("abandoned")
                copying.__exit__(InterruptedError, reason, None)
            connection.execute("rollback")
        except Exception:
            connection.close()
        self._sessions.give(connection)

    def _fail(self, error: BaseException) -> None:
        """Give up, and raise the error again with the name of the sink."""
        import psycopg

        self._give_up()
        uid = self._ledger.context.uid
        if isinstance(error, psycopg.Error):
            why = str(error).strip().replace("\n", "\n  ")
            raise EpochError(
                f"sink {uid!r} could not be written: PostgreSQL reports\n  {why}",
                sink=uid,
                sqlstate=error.sqlstate,
            ) from error
        if isinstance(error, EpochError):
            raise EpochError(f"sink {uid!r}: {error}", **{**error.facts, "sink": uid}) from error

    def _closed_error(self) -> EpochError:
        return EpochError(
            f"epoch {self._epoch} is closed: another driver has taken over, "
            "and the rows of this attempt are removed"
        )


class StagedWriter(CopyWriter):
    """Writes rows into a piece: a new table, which is listed when it is complete."""

    def __init__(self, *place: Any, schema: pa.Schema, key: Sequence[str]) -> None:
        super().__init__(*place, schema=schema)
        self._key = key
        if key and self._forms is not None:
            self._forms.append(NUMBER_FORM)
        self._piece = self._ledger.new_piece()

    def _begin(self, connection: Connection[Any]) -> str:
        # With the table's constraints on single rows: here an epoch can still fail, when it is
        # published it no longer can.
        statements = [
            f"create table {self._piece} (like {self._table.sql} including constraints)"
            " with (autovacuum_enabled = off)"
        ]
        statements += [
            f"alter table {self._piece} drop column {quote(name)} cascade"
            for name in self._table.extra(self._schema)
        ]
        names = list(self._schema.names)
        if self._key:
            statements.append(f"alter table {self._piece} add column {quote(POSITION)} bigint")
            names.append(POSITION)
        connection.execute("; ".join(statements).encode())
        # Frozen: the table is new in this transaction, so later readers need not check whether
        # its rows are committed.
        return f"{self._piece} ({quote_list(names)}) from stdin (format {self._format}, freeze)"

    def _encode(self, batch: pa.RecordBatch) -> bytes:
        for name in self._key:
            if batch[name].null_count:
                raise EpochError(
                    f"column {name!r} is a key and holds null\n"
                    "  next: filter such rows before the sink, or choose another key",
                    column=name,
                )
        if self._key:
            position = pa.array(np.arange(self._rows, self._rows + batch.num_rows))
            batch = pa.RecordBatch.from_arrays(
                [*batch.columns, position], [*batch.schema.names, POSITION]
            )
        return super()._encode(batch)

    def _end(self, connection: Connection[Any], digest: str) -> Committable:
        from psycopg import errors

        piece: Committable = {
            "subtask": self._subtask,
            "pass": self._ordinal,
            "digest": digest,
            "rows": self._rows,
            "table": [self._table.schema, self._table.name],
            "columns": self._schema.names,
        }
        if self._key:
            piece["key"] = list(self._key)
        # In one round trip: a slot that dies here holds no lock that others wait for.
        try:
            listed = connection.execute(
                f"{self._ledger.list_piece(self._epoch, piece, self._piece)}; commit;"
                f" {self._ledger.select_staged_from()}".encode()
            )
        except errors.UniqueViolation:
            # The same rows are listed already, by an earlier attempt or by a slot that was
            # believed dead: these are not needed.
            connection.execute("rollback")
            listed = connection.execute(self._ledger.select_staged_from().encode())
        if _last(listed) > self._epoch:
            self._ledger.drop(connection, self._epoch, [piece])
            raise self._closed_error()
        return piece


class PreparedWriter(CopyWriter):
    """Writes rows into the target, in a transaction that it prepares and the driver commits."""

    def _begin(self, connection: Connection[Any]) -> str:
        columns = quote_list(self._schema.names)
        return f"{self._table.sql} ({columns}) from stdin (format {self._format})"

    def _clear(self, connection: Connection[Any]) -> None:
        """Roll back lower attempts; while a slot waits for the server there may be many.

        The last one too if its rows could conflict: rows of one key wait for each other. Those of
        all subtasks: a row may come to another one this time.
        """
        below = self._attempt if self._table.is_exclusive else self._attempt - 1
        if below <= 0:
            return
        place = gid_of(self._ledger.key, self._epoch)
        for gid in find_gids(connection, place):
            _, ordinal_, attempt, _ = gid.removeprefix(place).split(":")
            if int(ordinal_) == self._ordinal and int(attempt) < below:
                roll_back_prepared(connection, gid)

    def _end(self, connection: Connection[Any], digest: str) -> Committable:
        from psycopg import errors

        place = gid_of(self._ledger.key, self._epoch, self._subtask, self._ordinal)
        gid = f"{place}{self._attempt}:{digest}"
        committable = {"gid": gid, "rows": self._rows}
        if gid in find_gids(connection, gid):
            connection.execute("rollback")
            return committable
        try:
            answer = connection.execute(
                f"{self._ledger.prove(self._epoch, gid)}; prepare transaction {literal(gid)};"
                f" {self._ledger.select_staged_from()}".encode()
            )
        except errors.UniqueViolation as error:
            connection.execute("rollback")
            if error.diag.table_name != "cairn_proofs":
                raise  # A deferred rule of the target.
            # Committed already: this slot was believed dead, and has been replaced.
            return committable
        if _last(answer) > self._epoch:
            roll_back_prepared(connection, gid)
            raise self._closed_error()
        return committable


def gid_of(key: str, *place: int) -> str:
    """Return the start of the names of transactions: job and sink, epoch, subtask, ordinal."""
    return ":".join(["cairn", key, *map(str, place), ""])


def find_gids(connection: Connection[Any], prefix: str) -> list[str]:
    rows = connection.execute(
        "select gid from pg_prepared_xacts"
        " where database = current_database() and starts_with(gid, %s)",
        [prefix],
    )
    return [gid for (gid,) in rows]


def epoch_of(gid: str) -> int:
    found = re.match(r"cairn:\w+:(\d+):", gid)
    assert found is not None, "a name that gid_of made"
    return int(found[1])


def roll_back_prepared(connection: Connection[Any], gid: str) -> None:
    from psycopg import errors

    # If it is gone or busy, another driver rolls it back or commits it.
    with suppress(errors.UndefinedObject, errors.ObjectNotInPrerequisiteState):
        connection.execute(f"rollback prepared {literal(gid)}".encode())


def _last(cursor: Any) -> int:
    """Return the number that the last of several statements has found."""
    while cursor.nextset():
        pass
    found = cursor.fetchone()
    return int(found[0]) if found else 0
