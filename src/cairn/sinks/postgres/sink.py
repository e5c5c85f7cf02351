"""PostgreSQL: rows arrive by COPY and appear as whole epochs, or subtask by subtask.

    append     subtasks COPY into staging, one transaction publishes the epoch with its mark
    upsert     the same, and the last row of each key replaces the one in the table
    prepared   each subtask COPYs into the table in a transaction that is prepared, and
               committed with the epoch: nothing is written twice, but an epoch appears
               subtask by subtask

Always true here:
- a mark in the database, keyed by job, sink, epoch and batch, proves the commit: in append
  and upsert the publishing transaction writes it, in prepared each transaction contains its own
  proof;
- an epoch that another driver has abandoned cannot be published, whole or in part;
- an epoch is published as it was prepared, with its mode, table, columns and key;
- a commit removes leftovers of earlier epochs: those are all published or abandoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from cairn.crash import crash_point
from cairn.errors import CommitError, EpochError, PlanError
from cairn.sinks.base import (
    Committable,
    Execution,
    Sink,
    SinkContext,
    Writer,
    away_error,
    causes,
)
from cairn.sinks.postgres.ledger import (
    DROPS_MAX,
    MISSING,
    PIECE,
    Ledger,
    create_alone,
    key_of,
    literal,
)
from cairn.sinks.postgres.session import Dsn, Sessions, check_installed, is_lost, session_name
from cairn.sinks.postgres.table import (
    Table,
    check_table,
    create_statement,
    find_table,
    parse_name,
    quote,
)
from cairn.sinks.postgres.writer import (
    PreparedWriter,
    StagedWriter,
    epoch_of,
    find_gids,
    gid_of,
    roll_back_prepared,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg import Connection

Mode = Literal["append", "upsert", "prepared"]
T = TypeVar("T")

_TRIM_EVERY = 100


class Postgres(Sink):
    """A table in PostgreSQL, each row exactly once.

    `dsn` is a libpq URI or conninfo. With 'env:NAME' each process reads it from its environment,
    a function is called in each process, and without a dsn libpq's variables (PGHOST …) and files
    (.pgpass) apply. All three keep passwords out of the pickled job. `schema` holds cairn's own
    tables, with marks and staged rows; by default it is the schema of the table.
    """

    def __init__(
        self,
        dsn: Dsn = None,
        table: str = "",
        *,
        mode: Mode = "append",
        key: Sequence[str] | str = (),
        create: bool = False,
        schema: str | None = None,
    ) -> None:
        if not table:
            raise PlanError("sinks.Postgres needs the name of a table: Postgres(dsn, 'orders')")
        if mode not in get_args(Mode):
            raise PlanError(f"unknown mode {mode!r}; modes are {', '.join(get_args(Mode))}")
        parse_name(table)
        self.table = table
        self.mode = mode
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.create = create
        self.schema = schema
        if (mode == "upsert") != bool(self.key):
            raise PlanError(
                "mode='upsert' needs key=, the columns of the primary key"
                if mode == "upsert"
                else f"key= is for mode='upsert', found mode={mode!r}"
            )
        self.shows = "pieces" if mode == "prepared" else "epochs"
        self._dsn = dsn

    def __repr__(self) -> str:
        return f"Postgres(table={self.table!r}, mode={self.mode!r})"

    def __getstate__(self) -> dict[str, Any]:
        names = ("table", "mode", "key", "create", "schema", "shows", "_dsn")
        return {name: vars(self)[name] for name in names}

    def open(self, context: SinkContext) -> None:
        check_installed()
        super().open(context)
        name = session_name(key_of(context), None, f"{context.job_name}/{context.uid}")
        self._sessions = Sessions(self._dsn, name)
        self._target: tuple[Table, Ledger] | None = None
        self._commits = 0
        if context.scratch is None:
            self._open_in_driver()

    def _open_in_driver(self) -> None:
        import psycopg

        schema = self.context.schema
        for name in self.key:
            if name not in schema.names:
                raise PlanError(
                    f"sink {self.context.uid!r}: the key {name!r} is not a column of the rows\n"
                    f"  columns: {', '.join(schema.names)}"
                )
        try:
            self._target = self._with_session(self._prepare_tables)
        except psycopg.Error as error:
            if is_lost(error):
                raise away_error(self.context.uid, error) from error
            raise PlanError(
                f"sink {self.context.uid!r} cannot use PostgreSQL: {str(error).strip()}\n"
                "  next: check the dsn, the server, and that the role may create tables in schema= "
                "or in the schema of the table",
                sink=self.context.uid,
            ) from error

    def _prepare_tables(self, connection: Connection[Any]) -> tuple[Table, Ledger]:
        """Find or create the table, check that rows fit, and create the ledger's tables."""
        schema = self.context.schema
        if self.mode == "prepared":
            self._check_can_prepare(connection)
        self._database = connection.info.dbname
        table = find_table(connection, self.table)
        if table is None and self.create:
            statement = create_statement(self.table, schema, self.key)
            connection.execute(create_alone(statement).encode())
        table = table or self._find_table(connection)
        check_table(table, schema, self.key)
        ledger = Ledger(self.context, self.schema or table.schema)
        connection.execute(ledger.create().encode())
        return table, ledger

    def _find_table(self, connection: Connection[Any]) -> Table:
        table = find_table(connection, self.table)
        if table is None:
            statement = create_statement(self.table, self.context.schema, self.key)
            raise PlanError(
                f"sink {self.context.uid!r}: table {self.table!r} does not exist\n"
                f"  next: pass create=True, or run\n{statement};",
                table=self.table,
            )
        return table

    def _check_can_prepare(self, connection: Connection[Any]) -> None:
        found = connection.execute("show max_prepared_transactions").fetchone()
        if found is None or found[0] == "0":
            raise PlanError(
                f"sink {self.context.uid!r}: mode='prepared' needs prepared transactions, and the "
                "server allows none\n"
                "  found: max_prepared_transactions = 0\n"
                "  next: set it above subtasks × checkpoint_every (× rounds, in a job with loops), "
                "summed over all such jobs, with room for attempts that fail, and restart the "
                "server; or use mode='append'"
            )

    def _open_target(self) -> tuple[Table, Ledger]:
        import psycopg

        if self._target is None:
            try:
                table = self._with_session(self._find_table)
            except psycopg.Error as error:
                uid, why = self.context.uid, str(error).strip()
                raise EpochError(f"sink {uid!r} could not be reached: {why}", sink=uid) from error
            self._target = table, Ledger(self.context, self.schema or table.schema)
        return self._target

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        table, ledger = self._open_target()
        place = self._sessions, ledger, table, epoch, subtask, execution
        if self.mode == "prepared":
            return PreparedWriter(*place, schema=self.context.schema)
        return StagedWriter(*place, schema=self.context.schema, key=self.key)

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        if not committables:
            return
        self._reaching(
            f"publish epoch {epoch}", lambda c: self._commit(c, epoch, committables, batch)
        )
        self._commits += 1

    def _commit(
        self, connection: Connection[Any], epoch: int, pieces: Sequence[Committable], batch: int
    ) -> None:
        # As they were prepared: the mode may have changed since.
        publish = self._commit_prepared if "gid" in pieces[0] else self._publish
        publish(connection, epoch, pieces, batch)
        self._remove(connection, epoch)
        if self._commits % _TRIM_EVERY == 0:
            connection.execute(self._open_target()[1].trim().encode())

    def _publish(
        self, connection: Connection[Any], epoch: int, pieces: Sequence[Committable], batch: int
    ) -> None:
        import psycopg

        table, ledger = self._open_target()
        # Rows of a later batch or round are newer, in every subtask.
        pieces = sorted(pieces, key=lambda piece: (piece["pass"], piece["subtask"]))
        # As it was prepared: this program may have another table, columns or key. Committables
        # of older versions name only the key.
        first = pieces[0]
        into = quote(*first["table"]) if "table" in first else table.sql
        columns = first.get("columns", self.context.schema.names)
        statement = ledger.publish(into, columns, first.get("key", ()), epoch, batch, pieces)
        crash_point("driver.sink.unmarked")
        try:
            connection.execute(statement.encode())
        except psycopg.Error as error:
            why = error.diag.message_primary or ""
            if error.sqlstate == MISSING or (error.sqlstate == "42P01" and PIECE in why):
                raise ledger.missing_error(epoch, why) from error
            raise
        if len(pieces) > DROPS_MAX:
            ledger.drop(connection, epoch, pieces)

    def _commit_prepared(
        self, connection: Connection[Any], epoch: int, pieces: Sequence[Committable], batch: int
    ) -> None:
        from psycopg import errors

        ledger = self._open_target()[1]
        if ledger.is_published(connection, epoch, batch):
            return
        for piece in pieces:
            try:
                connection.execute(f"commit prepared {literal(piece['gid'])}".encode())
            except errors.UndefinedObject as error:
                # It was committed or abandoned: its proof decides. Proofs are kept until long
                # after the mark of their epoch is written.
                if not ledger.is_proven(connection, epoch, piece["gid"]):
                    if ledger.is_published(connection, epoch, batch):
                        return
                    why = f"its prepared transaction {piece['gid']} is gone"
                    raise ledger.missing_error(epoch, why) from error
            crash_point("driver.sink.piece")
        crash_point("driver.sink.unmarked")
        connection.execute(ledger.mark(epoch, batch).encode())

    def newest_mark(self) -> int | None:
        marks: list[int | None] = []
        ledger = self._open_target()[1]
        self._reaching("look for its marks", lambda c: marks.append(ledger.newest_mark(c)))
        return marks[0]

    def recover(self, before_epoch: int) -> None:
        self._reaching("remove abandoned epochs", lambda c: self._recover(c, before_epoch))

    def _recover(self, connection: Connection[Any], before_epoch: int) -> None:
        # Close the epochs first, then remove their contents: see the ledger.
        connection.execute(self._open_target()[1].close_epochs(before_epoch).encode())
        self._remove(connection, before_epoch)

    def _remove(self, connection: Connection[Any], before_epoch: int) -> None:
        """Remove leftovers of closed epochs; those that are locked wait for the next time."""
        ledger = self._open_target()[1]
        connection.execute(ledger.end_sessions(before_epoch).encode())
        for gid in find_gids(connection, gid_of(ledger.key)):
            if epoch_of(gid) < before_epoch:
                roll_back_prepared(connection, gid)
        ledger.drop_staged(connection, before_epoch)

    @property
    def target(self) -> str:
        # Without the host: it may have several names. An epoch staged on another server is not
        # found here, so it cannot be published twice.
        table, ledger = self._open_target()
        staged = "" if ledger.schema == table.schema else f", staged in schema {ledger.schema!r}"
        return f"table {table.sql} of PostgreSQL database {self._database!r}{staged}"

    def is_away(self, error: Exception) -> bool:
        """True if the server cannot be reached now, and may be later."""
        return any(is_lost(each) for each in causes(error))

    def _reaching(self, what: str, act: Callable[[Connection[Any]], None]) -> None:
        import psycopg

        uid = self.context.uid
        try:
            self._with_session(act)
        except psycopg.Error as error:
            why = str(error).strip().replace("\n", "\n  ")
            raise CommitError(
                f"sink {uid!r} could not {what}: PostgreSQL reports\n  {why}",
                sink=uid,
                sqlstate=error.sqlstate,
            ) from error

    def _with_session(self, act: Callable[[Connection[Any]], T]) -> T:
        """Call `act` with a connection, which is closed if the call fails."""
        connection = self._sessions.take()
        try:
            done = act(connection)
        except BaseException:
            connection.close()
            raise
        finally:
            self._sessions.give(connection)
        return done

    def close(self) -> None:
        self._sessions.close()
