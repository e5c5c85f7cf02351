"""Connections to PostgreSQL: opened when needed, reused, and closed when they break.

Always true here:
- no message, log or repr shows the dsn: it may hold a password;
- a session is named after its job, sink and epoch, so an abandoned one can be found;
- waiting for a lock or for a lost server ends with an error; a running statement is never cut
  off for taking long;
- a commit is durable when it returns, whatever the settings of the role.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cairn.errors import PlanError
from cairn.sinks.environment import read_setting

if TYPE_CHECKING:
    from psycopg import Connection

Dsn = str | Callable[[], str] | None

CONNECT_TIMEOUT_S = 10

# Client and server each notice when the other is gone.
_CLIENT = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_SERVER = {
    "client_min_messages": "warning",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "idle_in_transaction_session_timeout": "60s",
    "lock_timeout": "10s",
    "statement_timeout": "0",
    "standard_conforming_strings": "on",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


def check_installed() -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise PlanError(
            "sinks.Postgres needs the package psycopg, which cannot be imported: "
            f"{error}\n  next: pip install 'cairn-state[postgres]', also where the executors run"
        ) from None


def session_name(key: str, epoch: int | None, label: str) -> str:
    """Return the session's name for pg_stat_activity.

    The server keeps 63 bytes, so the parts that are searched for come first.
    """
    return f"cairn:{key}:{'-' if epoch is None else epoch}:{label}".encode()[:63].decode(
        errors="ignore"
    )


def connect(dsn: Dsn, name: str) -> Connection[Any]:
    import psycopg

    connection = psycopg.connect(
        **{**_CLIENT, **_parameters(dsn), "client_encoding": "utf8", "application_name": name},
        autocommit=True,
        prepare_threshold=None,
    )
    try:
        connection.execute(_settings(connection.info.server_version))
    except BaseException:
        connection.close()
        raise
    return connection


def _settings(server_version: int) -> bytes:
    """Return one statement that sets all of them, in one round trip."""
    values = dict(_SERVER)
    if server_version >= 170000:
        values["transaction_timeout"] = "0"
    return (
        "".join(f"set {name} = '{value}'; " for name, value in values.items())
        + "select set_config('synchronous_commit', 'on', false)"
        " where current_setting('synchronous_commit') = 'off'"
    ).encode()


def _parameters(dsn: Dsn) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    text = read_setting(dsn() if callable(dsn) else dsn or "", "the dsn")
    try:
        return dict(conninfo_to_dict(text))
    except psycopg.ProgrammingError:
        raise PlanError(
            "the dsn cannot be read (it is not shown: it may hold a password)\n"
            "  expected: 'postgresql://user@host:5432/database' or 'host=… dbname=… user=…'"
        ) from None


def is_lost(error: BaseException) -> bool:
    """True if an error is about the connection, not about the statement."""
    import psycopg

    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        # Without a state it comes from the client. The others are the server's reasons to
        # refuse or end a connection: lost, too many, shutting down, starting.
        state = error.sqlstate
        return state is None or state.startswith(("08", "57P")) or state == "53300"
    return isinstance(error, ConnectionError | TimeoutError)


def _is_broken(connection: Connection[Any]) -> bool:
    """True if the server has closed it: between statements nothing else makes it readable."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class Sessions:
    """The connections of a sink in one process: one, unless two writers are at work."""

    def __init__(self, dsn: Dsn, name: str) -> None:
        self._dsn = dsn
        self._name = name
        self._idle: Connection[Any] | None = None
        self._taken: list[Connection[Any]] = []

    def take(self) -> Connection[Any]:
        kept, self._idle = self._idle, None
        if kept is not None and _is_broken(kept):
            kept.close()
            kept = None
        kept = kept or connect(self._dsn, self._name)
        self._taken.append(kept)
        return kept

    def give(self, connection: Connection[Any]) -> None:
        """Take a connection back for reuse, or close it if a transaction is open."""
        from psycopg.pq import TransactionStatus

        is_taken = connection in self._taken
        is_idle = connection.info.transaction_status == TransactionStatus.IDLE
        self._taken = [taken for taken in self._taken if taken is not connection]
        if is_taken and self._idle is None and is_idle:
            self._idle = connection
        else:
            connection.close()

    def close(self) -> None:
        """Close all, those of writers too: the server rolls their transactions back."""
        for connection in [*self._taken, self._idle]:
            if connection is not None:
                connection.close()
        self._idle, self._taken = None, []
