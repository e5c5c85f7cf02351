"""PostgreSQL: rows arrive by COPY, whole epochs appear at once, or each row once.

    append     subtasks COPY into staging, one transaction publishes the epoch with its mark
    upsert     the same, and of each key the last row replaces what the table held
    prepared   each subtask COPYs into the table inside a transaction that is prepared, and
               committed when the epoch is: nothing is written twice, but an epoch appears
               subtask by subtask

Always true here:
- a mark in the database, keyed by job, sink, epoch and batch, proves the commit: in append
  and upsert it is in the transaction that publishes, in prepared each transaction has its own
  proof inside;
- what another driver gave up cannot be published, whole or in part;
- an epoch is published as it was prepared, with the mode, table, columns and key of then;
- a commit removes what is left of epochs before it: those are all published, or given up.
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
    away_at_start,
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
    gid_of,
    prepared_gids,
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

    `dsn` is a libpq URI or conninfo; 'env:NAME' reads it from the environment of each process,
    a function is called there, and without one libpq's own variables (PGHOST …) and files
    (.pgpass) decide. Either keeps passwords out of what is sent to the slots.
    `schema` is where cairn's own tables are, marks and staged rows: that of the table, if
    nothing else is said.
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
        self.shows = "pieces" if mode == "prepared" else "epochs"  # type: ignore[misc]
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
                    f"sink {self.context.uid!r}: the key {name!r} is no column of the rows\n"
                    f"  columns: {', '.join(schema.names)}"
                )
        try:
            self._target = self._with_session(self._checked)
        except psycopg.Error as error:
            if is_lost(error):
                raise away_at_start(self.context.uid, error) from error
            raise PlanError(
                f"sink {self.context.uid!r} cannot use PostgreSQL: {str(error).strip()}\n"
                "  next: check the dsn, the server, and what the role may do: it creates tables in "
                "schema=, or where the target is",
                sink=self.context.uid,
            ) from error

    def _checked(self, connection: Connection[Any]) -> tuple[Table, Ledger]:
        """The table that rows fit into, made if need be, and the tables beside it."""
        schema = self.context.schema
        if self.mode == "prepared":
            self._check_can_prepare(connection)
        self._database = connection.info.dbname
        table = find_table(connection, self.table)
        if table is None and self.create:
            statement = create_statement(self.table, schema, self.key)
            connection.execute(create_alone(statement).encode())
        table = table or self._found(connection)
        check_table(table, schema, self.key)
        ledger = Ledger(self.context, self.schema or table.schema)
        connection.execute(ledger.create().encode())
        return table, ledger

    def _found(self, connection: Connection[Any]) -> Table:
        table = find_table(connection, self.table)
        if table is None:
            statement = create_statement(self.table, self.context.schema, self.key)
            raise PlanError(
                f"sink {self.context.uid!r}: there is no table {self.table!r}\n"
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

    def _opened(self) -> tuple[Table, Ledger]:
        import psycopg

        if self._target is None:
            try:
                table = self._with_session(self._found)
            except psycopg.Error as error:
                uid, said = self.context.uid, str(error).strip()
                raise EpochError(f"sink {uid!r} could not be reached: {said}", sink=uid) from error
            self._target = table, Ledger(self.context, self.schema or table.schema)
        return self._target

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        table, ledger = self._opened()
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
        # As they were prepared: the mode may have been another one then.
        publish = self._commit_prepared if "gid" in pieces[0] else self._publish
        publish(connection, epoch, pieces, batch)
        self._remove(connection, epoch)
        if self._commits % _TRIM_EVERY == 0:
            connection.execute(self._opened()[1].trim().encode())

    def _publish(
        self, connection: Connection[Any], epoch: int, pieces: Sequence[Committable], batch: int
    ) -> None:
        import psycopg

        table, ledger = self._opened()
        # Rows of a later batch or round are newer, whichever subtask they came from.
        pieces = sorted(pieces, key=lambda piece: (piece["pass"], piece["subtask"]))
        # As it was prepared: this program may have another table, other columns, another key.
        # Committables of older versions name the key only.
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

        ledger = self._opened()[1]
        if ledger.is_published(connection, epoch, batch):
            return
        for piece in pieces:
            try:
                connection.execute(f"commit prepared {literal(piece['gid'])}".encode())
            except errors.UndefinedObject as error:
                # Gone because it is committed, or because it was given up: its proof decides.
                # Proofs end long after the mark of their epoch is there.
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
        ledger = self._opened()[1]
        self._reaching("look for its marks", lambda c: marks.append(ledger.newest_mark(c)))
        return marks[0]

    def recover(self, before_epoch: int) -> None:
        self._reaching("remove what was given up", lambda c: self._recover(c, before_epoch))

    def _recover(self, connection: Connection[Any], before_epoch: int) -> None:
        # First the epochs are closed, then what is in them is removed: see the ledger.
        connection.execute(self._opened()[1].close_epochs(before_epoch).encode())
        self._remove(connection, before_epoch)

    def _remove(self, connection: Connection[Any], before_epoch: int) -> None:
        """What is left in closed epochs, but for what somebody holds: that is for the next time."""
        ledger = self._opened()[1]
        connection.execute(ledger.end_sessions(before_epoch).encode())
        for gid in prepared_gids(connection, gid_of(ledger.key)):
            if epoch_of(gid) < before_epoch:
                roll_back_prepared(connection, gid)
        ledger.drop_staged(connection, before_epoch)

    @property
    def target(self) -> str:
        # Not by its host: that may have several names, and an epoch that another server holds
        # is not found there, so it is never published twice.
        table, ledger = self._opened()
        staged = "" if ledger.schema == table.schema else f", staged in schema {ledger.schema!r}"
        return f"table {table.sql} of PostgreSQL database {self._database!r}{staged}"

    def is_away(self, error: Exception) -> bool:
        """Whether the server cannot be reached now, and may be later."""
        return any(is_lost(each) for each in causes(error))

    def _reaching(self, what: str, act: Callable[[Connection[Any]], None]) -> None:
        import psycopg

        uid = self.context.uid
        try:
            self._with_session(act)
        except psycopg.Error as error:
            said = str(error).strip().replace("\n", "\n  ")
            raise CommitError(
                f"sink {uid!r} could not {what}: PostgreSQL says\n  {said}",
                sink=uid,
                sqlstate=error.sqlstate,
            ) from error

    def _with_session(self, act: Callable[[Connection[Any]], T]) -> T:
        """Acts on a connection, which is given up when anything fails on the way."""
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
