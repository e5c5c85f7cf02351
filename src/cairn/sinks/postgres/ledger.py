"""What a sink keeps in the database beside the rows: four small tables in the target's schema.

    cairn_sinks    one row per job and sink: which epochs are closed, from where marks are kept
    cairn_marks    one row per published epoch and batch: the proof
    cairn_staged   one row per staged piece: where a subtask's rows of an epoch wait
    cairn_proofs   one row per transaction that is committed in two phases, written inside it

A piece is named by its place (epoch, batch, round, subtask) and the digest of its content, and lies
in a table of its own: publishing never waits for an abandoned session that still writes, and
dropping it leaves no dead rows behind but in the catalog, some thirty, for autovacuum.

Two columns have old names: `part` of a mark is its batch, `pass` of a piece is its `ordinal`.

Always true here:
- the rows of an epoch and its mark are one transaction, and that is one statement: a driver
  that stops halfway holds no lock;
- a piece is listed as long as its table is there, and dropped when it is published or given up;
- pieces are taken in one order by all, each in the list first and then its table, so nobody
  waits in a circle;
- a mark is written once; whoever comes second waits for the first and finds it;
- a proof is written once, so a transaction prepared again after its commit cannot be committed;
- an epoch below `marks_from` has been published: epochs are published in order, each
  before the next begins;
- nothing stays staged in an epoch below `staged_from`, which rises with each mark: the
  session that stages looks after its commit, the driver that closes the epoch looks after closing
  it, so one of the two sees the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from cairn.errors import CommitError
from cairn.ids import digest, new_id
from cairn.sinks.base import ROUNDS_MAX, Committable, Execution, SinkContext
from cairn.sinks.postgres.table import quoted, quoted_list

if TYPE_CHECKING:
    from psycopg import Connection

MARKS_KEPT = 1000
"""Epochs whose marks stay, per job and sink."""

DROPS_MAX = 50
"""Tables dropped in one transaction: each takes several of the server's locks, which are few."""

DROP_WAIT = "1s"
"""How long a table to be dropped is waited for. Who holds it ends at some time, and then the
next commit drops it."""

PIECE = "cairn_piece_"
"""How names of staged tables begin."""

MISSING = "CA001"
"""The SQLSTATE of a publication that does not find what was staged."""

POSITION = "cairn position"
"""The column of a piece that tells which row of a key is the last."""

_LITTLE_MEMORY = "where pg_size_bytes(current_setting('work_mem')) < 64 * 1024 * 1024"
_CREATE_LOCK = 0x636169726E  # "cairn"


def key_of(context: SinkContext) -> str:
    """A short name of job and sink, for names the server limits."""
    return digest(context.job_id.encode(), context.uid.encode())[:16]


def literal(value: Any) -> str:
    """A value inside a statement that cannot have parameters."""
    if isinstance(value, int):
        return str(value)
    return "'" + str(value).replace("'", "''") + "'"


def block(body: str) -> str:
    """Statements that run as one, on the server."""
    tag = f"$cairn_{digest(body.encode())[:12]}$"
    return f"do {tag}\n{body}\n{tag}"


def alone(statements: str) -> str:
    """One transaction that no other cairn runs beside: `if not exists` is not safe for two."""
    return f"begin; select pg_advisory_xact_lock({_CREATE_LOCK}); {statements}; commit"


class Ledger:
    """The tables of one job's sink, next to its target."""

    def __init__(self, context: SinkContext, schema: str) -> None:
        self.context = context
        self.schema = schema
        self.key = key_of(context)
        self.sinks = quoted(schema, "cairn_sinks")
        self.marks = quoted(schema, "cairn_marks")
        self.staged = quoted(schema, "cairn_staged")
        self.proofs = quoted(schema, "cairn_proofs")
        self._mine = f"job = {literal(context.job_id)} and sink = {literal(context.uid)}"
        self._who = f"{literal(context.job_id)}, {literal(context.uid)}"

    def create(self) -> str:
        """The tables, and the row of this sink."""
        return alone(
            f"""
            create table if not exists {self.sinks} (
              job text, sink text, job_name text not null,
              staged_from bigint not null default 0, marks_from bigint not null default 0,
              primary key (job, sink));
            create table if not exists {self.marks} (
              job text, sink text, epoch bigint, part integer,
              published_at timestamptz not null default clock_timestamp(),
              primary key (job, sink, epoch, part));
            create table if not exists {self.staged} (
              job text, sink text, epoch bigint, pass bigint, subtask integer, digest text,
              rows bigint not null, place text not null,
              primary key (job, sink, epoch, pass, subtask, digest));
            create table if not exists {self.proofs} (
              job text, sink text, epoch bigint, gid text,
              primary key (job, sink, epoch, gid));
            insert into {self.sinks} (job, sink, job_name)
              values ({self._who}, {literal(self.context.job_name)}) on conflict do nothing;
            """
        )

    # In a slot

    def new_piece(self) -> str:
        """A name nobody has: which of two equal pieces stays is decided when they are listed."""
        return quoted(self.schema, f"{PIECE}{new_id()}")

    def staged_from(self) -> str:
        """Asks from which epoch on rows are still taken."""
        return f"select staged_from from {self.sinks} where {self._mine}"

    def list_piece(self, epoch: int, piece: Committable, place: str) -> str:
        return (
            f"insert into {self.staged} values ({self._who}, {epoch}, {_place(piece)},"
            f" {piece['rows']}, {literal(place)})"
        )

    def prove(self, epoch: int, gid: str) -> str:
        return f"insert into {self.proofs} values ({self._who}, {epoch}, {literal(gid)})"

    # In the driver

    def gone(self, epoch: int, why: str) -> CommitError:
        uid = self.context.uid
        return CommitError(
            f"sink {uid!r} cannot publish epoch {epoch}: {why}\n"
            "  nothing of it was published now: another driver has given the epoch up, or staged "
            "rows were removed by hand\n"
            f"  marks and staged rows are looked for in schema {self.schema!r}\n"
            "  next: if another run of this job is active, stop this one; if dsn, schema= or the "
            "table's schema were others before, go back to those; else start the job again",
            sink=uid,
            epoch=epoch,
            schema=self.schema,
        )

    def publish(
        self, table: str, columns: Sequence[str], key: Sequence[str], epoch: int, batch: int,
        pieces: Sequence[Committable],
    ) -> str:  # fmt: skip
        """Everything of an epoch into the table, with its mark, as one statement.

        `table` is its quoted name. Pieces are dropped in it too, unless they are many: then
        `drop` follows.
        """
        wanted = ", ".join(
            f"({i}, {_place(piece)}, {piece['rows']})" for i, piece in enumerate(pieces)
        )
        before, after = _move_statements(table, columns, key)
        move = f"execute {literal(before)} || place_ || {literal(after)};"
        held = "execute 'select count(*) from ' || place_ into rows_;"
        # A trigger of the table may have left rows out.
        count = "get diagnostics rows_ = row_count;"
        count += f" if rows_ is distinct from piece.rows then {held} end if;"
        if key:
            # Rows of one key are one row there, so how many are moved says nothing. They are
            # sorted, and the server's own limit is small for that.
            count = f"perform set_config('work_mem', '64MB', true) {_LITTLE_MEMORY}; {move}"
            move = held
        take, drop = f"select s.place into place_ from {self._listed(epoch)}", ""
        if len(pieces) <= DROPS_MAX:
            take, drop = self._take(epoch), "execute 'drop table ' || place_;"
        return block(
            f"""
            declare
              piece record;
              place_ text;
              rows_ bigint;
            begin
              if (select marks_from > {epoch} from {self.sinks} where {self._mine}) then
                return;
              end if;
              insert into {self.marks} (job, sink, epoch, part)
                values ({self._who}, {epoch}, {batch}) on conflict do nothing;
              if not found then
                return;
              end if;
              for piece in select * from (values {wanted})
                as w(place, pass, subtask, digest, rows) order by place
              loop
                {take};
                if not found then
                  raise exception using errcode = '{MISSING}', message =
                    format('rows that subtask %s staged are gone', piece.subtask);
                end if;
                {move}
                {count}
                if rows_ is distinct from piece.rows then
                  raise exception using errcode = '{MISSING}', message = format(
                    'subtask %s staged %s rows, of which %s are there',
                    piece.subtask, piece.rows, rows_);
                end if;
                {drop}
              end loop;
              {self.close_epochs(epoch)};
            end"""
        )

    def _listed(self, epoch: int) -> str:
        return (
            f"{self.staged} s where {self._mine} and epoch = {epoch} and s.pass = piece.pass"
            " and s.subtask = piece.subtask and s.digest = piece.digest"
        )

    def _take(self, epoch: int) -> str:
        """A piece off the list, for whoever drops its table in the same transaction."""
        return f"delete from {self._listed(epoch)} returning s.place into place_"

    def drop(self, connection: Connection[Any], epoch: int, pieces: Sequence[Committable]) -> None:
        """Drops what is there of these pieces, a few at a time, but for what somebody holds."""
        from psycopg import errors

        for start in range(0, len(pieces), DROPS_MAX):
            wanted = ", ".join(f"({_place(piece)})" for piece in pieces[start : start + DROPS_MAX])
            statement = block(
                f"""
                declare
                  piece record;
                  place_ text;
                begin
                  perform set_config('lock_timeout', '{DROP_WAIT}', true);
                  for piece in select * from (values {wanted}) as w(pass, subtask, digest)
                    order by pass, subtask, digest
                  loop
                    {self._take(epoch)};
                    if found then
                      execute 'drop table if exists ' || place_;
                    end if;
                  end loop;
                end"""
            )
            with suppress(errors.LockNotAvailable):
                connection.execute(statement.encode())

    def is_published(self, connection: Connection[Any], epoch: int, batch: int) -> bool:
        found = connection.execute(
            f"select exists (select from {self.marks} where {self._mine} and epoch = {epoch}"
            f" and part = {batch}) or exists (select from {self.sinks} where {self._mine}"
            f" and marks_from > {epoch})".encode()
        ).fetchone()
        return bool(found and found[0])

    def newest_mark(self, connection: Connection[Any]) -> int | None:
        found = connection.execute(
            f"select max(epoch) from {self.marks} where {self._mine}".encode()
        ).fetchone()
        return None if found is None else found[0]

    def is_proven(self, connection: Connection[Any], epoch: int, gid: str) -> bool:
        found = connection.execute(
            f"select exists (select from {self.proofs} where {self._mine} and epoch = {epoch}"
            f" and gid = {literal(gid)})".encode()
        ).fetchone()
        return bool(found and found[0])

    def mark(self, epoch: int, batch: int) -> str:
        """The mark of an epoch whose transactions are all committed."""
        return (
            f"insert into {self.marks} (job, sink, epoch, part)"
            f" values ({self._who}, {epoch}, {batch}) on conflict do nothing;"
            f" {self.close_epochs(epoch)}"
        )

    def trim(self) -> str:
        """Forgets marks of long ago; `marks_from` remembers that they were there."""
        return block(
            f"""
            declare oldest bigint;
            begin
              select epoch into oldest from
                (select distinct epoch from {self.marks} where {self._mine}) as e
                order by epoch desc offset {MARKS_KEPT} limit 1;
              if found then
                update {self.sinks} set marks_from = greatest(marks_from, oldest + 1)
                  where {self._mine};
                delete from {self.marks} where {self._mine} and epoch <= oldest;
                delete from {self.proofs} where {self._mine} and epoch <= oldest;
              end if;
            end"""
        )

    def close_epochs(self, before_epoch: int) -> str:
        return (
            f"update {self.sinks} set staged_from = {before_epoch} where {self._mine}"
            f" and staged_from < {before_epoch}"
        )

    def drop_staged(self, connection: Connection[Any], before_epoch: int) -> None:
        found = connection.execute(
            f"select epoch, pass, subtask, digest from {self.staged}"
            f" where {self._mine} and epoch < {before_epoch}"
            " order by epoch, pass, subtask, digest".encode()
        )
        names = ("pass", "subtask", "digest")
        for epoch, rows in groupby(found.fetchall(), key=itemgetter(0)):
            pieces = [dict(zip(names, row[1:], strict=True)) for row in rows]
            self.drop(connection, epoch, pieces)

    def end_sessions(self, before_epoch: int) -> str:
        """Ends sessions of slots that are inside a transaction of a closed epoch.

        Nobody can commit what they write, so nothing is lost; a slot that still lives connects
        again. One may have gone on to a newer epoch just now: its attempt fails and is repeated.
        """
        return (
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = current_database() and usename = current_user"
            " and pid <> pg_backend_pid() and xact_start is not null"
            f" and substring(application_name from '^cairn:{self.key}:([0-9]+):')::bigint"
            f" < {before_epoch}"
        )


def ordinal(execution: Execution) -> int:
    """Return one number for batch and round, which rises in the order in which they run."""
    return execution.batch * ROUNDS_MAX + execution.round


def _place(piece: Committable) -> str:
    return f"{piece['pass']}, {piece['subtask']}, {literal(piece['digest'])}"


def _move_statements(table: str, columns: Sequence[str], key: Sequence[str]) -> tuple[str, str]:
    """What moves a piece's rows, before and after its name: of each key the last one."""
    into, names = f"insert into {table} ({quoted_list(columns)})", quoted_list(columns)
    if not key:
        return f"{into} select {names} from ", ""
    keys = quoted_list(key)
    update = ", ".join(f"{quoted(n)} = excluded.{quoted(n)}" for n in columns if n not in key)
    return (
        f"{into} select distinct on ({keys}) {names} from ",
        f" order by {keys}, {quoted(POSITION)} desc on conflict ({keys}) "
        + (f"do update set {update}" if update else "do nothing"),
    )
