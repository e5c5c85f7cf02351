"""Connections to PostgreSQL, for sinks and for state.

Always true here:
- waiting for a lock or for a lost server ends with an error; a running statement is never cut
  off for taking long;
- a commit is durable when it returns, whatever the settings of the role.
"""

from __future__ import annotations

import select
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psycopg import Connection

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


def open_connection(parameters: Mapping[str, Any], name: str) -> Connection[Any]:
    """Open a connection that commits by itself, outside of transactions."""
    import psycopg

    connection = psycopg.connect(
        **{**_CLIENT, **parameters, "client_encoding": "utf8", "application_name": name},
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


def is_lost(error: BaseException) -> bool:
    """True if an error is about the connection, not about the statement."""
    import psycopg

    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        # Without a state it comes from the client. The others are the server's reasons to
        # refuse or end a connection: lost, too many, shutting down, starting.
        state = error.sqlstate
        return state is None or state.startswith(("08", "57P")) or state == "53300"
    return isinstance(error, ConnectionError | TimeoutError)


def is_broken(connection: Connection[Any]) -> bool:
    """True if the server has closed it: between statements nothing else makes it readable."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
