"""The way to a PostgreSQL database of state: its address, and a connection that is made again.

Always true here:
- a password is in no address, message, log or repr: it comes from the job's URL or from the
  environment of the process, as libpq reads it (PGPASSWORD, PGPASSFILE, …);
- an error of a database that cannot be reached has the fact `is_away`: the job waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from cairn.backends.postgres.binary import register
from cairn.errors import EpochError, PlanError
from cairn.storage.postgres_session import is_lost, open_connection

if TYPE_CHECKING:
    from psycopg import Connection

T = TypeVar("T")
Address = Mapping[str, str]
"""Parameters of a connection without secrets."""
_SECRET: Final = ("password", "sslpassword", "passfile")
_known: dict[bytes, dict[str, str]] = {}
"""Parameters with secrets, by address: of the databases that this process was given a URL of."""


def parameters_of(url: str) -> dict[str, str]:
    """Return the parameters of a URL, and remember its password for this process."""
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise PlanError(
            f"state in PostgreSQL needs the package psycopg, which cannot be imported: {error}\n"
            "  next: pip install 'cairn-state[postgres]', also where the executors run"
        ) from None
    try:
        found = {name: str(value) for name, value in conninfo_to_dict(url).items() if value}
    except psycopg.ProgrammingError:
        raise PlanError(
            "the URL of the backend cannot be read (it is not shown: it may hold a password)\n"
            "  expected: 'postgresql://user@host:5432/database'"
        ) from None
    _known[_name(address_of(found))] = found
    return found


def address_of(parameters: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(parameters.items()) if name not in _SECRET}


def describe(address: Address) -> str:
    """Return an address for people."""
    host = address.get("host", "localhost")
    port = f":{address['port']}" if "port" in address else ""
    return f"postgresql://{host}{port}/{address.get('dbname', '')}"


def _name(address: Address) -> bytes:
    return msgspec.json.encode(dict(sorted(address.items())))


class Link:
    """One connection, used by one thread at a time."""

    def __init__(self, address: Address, label: str) -> None:
        self._address = address
        self._label = label
        self._lock = threading.RLock()
        self._connection: Connection[Any] | None = None
        self._is_closed = False
        self.prepared: set[str] = set()
        """Work that need not be done again on this connection."""

    def run(self, work: Callable[[Connection[Any]], T]) -> T:
        """Call `work`, a second time if the connection was lost meanwhile."""
        with self._lock:
            assert not self._is_closed, "the link is closed"
            try:
                return work(self._connect())
            except Exception as error:
                if not is_lost(error):
                    raise
                self._disconnect()
            try:
                return work(self._connect())
            except Exception as error:
                if not is_lost(error):
                    raise
                self._disconnect()
                where = describe(self._address)
                raise EpochError(
                    f"the database of the job's state cannot be reached: {where}\n"
                    f"  cause: {type(error).__name__}: {_first_line(error)}\n"
                    "  next: repair the database; the job waits for it, and nothing is lost",
                    database=where,
                    is_away=True,
                ) from None

    def _connect(self) -> Connection[Any]:
        if self._connection is None or self._connection.closed:
            parameters = _known.get(_name(self._address), self._address)
            self._connection = open_connection(parameters, self._label)
            register(self._connection)
            self._connection.execute("set enable_seqscan = off; set jit = off")
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self.prepared.clear()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._disconnect()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
