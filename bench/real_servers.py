"""The servers for benchmarks of sinks: those of the tests, with durable settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from tests import servers


def postgres() -> str:
    """The URI of an empty database on a server that syncs what it commits."""
    import psycopg

    server = servers.postgres()
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute("alter system set fsync = on")
        connection.execute("select pg_reload_conf()")
    return server.new_database()


def redis() -> Any:
    """A client of an empty server."""
    client = servers.redis()
    client.flushall()
    return client


def redis_url() -> str:
    return f"unix://{servers.redis().socket_file}?db=0"
