"""Connections to PostgreSQL: opened when needed, reused, and closed when they break.

Always true here:
- no message, log or repr shows the dsn: it may hold a password;
- a session is named after its job, sink and epoch, so an abandoned one can be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cairn.errors import PlanError
from cairn.storage.environment import read_setting
from cairn.storage.postgres_session import is_broken, is_lost, open_connection

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["Dsn", "Sessions", "check_installed", "connect", "is_lost", "session_name"]

Dsn = str | Callable[[], str] | None


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
    return open_connection(_parameters(dsn), name)


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


class Sessions:
    """The connections of a sink in one process: one, unless two writers are at work."""

    def __init__(self, dsn: Dsn, name: str) -> None:
        self._dsn = dsn
        self._name = name
        self._idle: Connection[Any] | None = None
        self._taken: list[Connection[Any]] = []

    def take(self) -> Connection[Any]:
        kept, self._idle = self._idle, None
        if kept is not None and is_broken(kept):
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
