"""The servers for benchmarks: those of the tests, with durable settings."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def state_redis_url() -> str:
    """The URL of an empty server for state, which syncs its file every second."""
    server = servers.redis_server()
    client = server.client()
    client.config_set("appendfsync", "everysec")
    client.flushall()
    client.close()
    return server.url


def redis_markers(url: str, job_id: str) -> list[str]:
    """Return the marker of each key group that a job has in Redis."""
    import redis

    with redis.Redis.from_url(url) as client:
        claims = [claim.decode() for claim in client.smembers(f"cairn:{job_id}:claims")]
        places = [claim.split(":", 1) for claim in claims]
        found = [client.hget(f"cairn:{job_id}:{{{op}:{grp}}}:rows", "v") for grp, op in places]
    return [(marker or b"").decode() for marker in found] or [""]


def rows_read(url: str) -> int:
    """Return how many rows of state were read from a database, by index or by a scan.

    Only those of sessions that have ended; it waits for the others.
    """
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        # A session reports what it has done when it ends.
        deadline = time.monotonic() + 30
        while connection.execute(
            "select count(*) from pg_stat_activity where application_name like 'cairn:%'"
        ).fetchone() != (0,):
            if time.monotonic() > deadline:
                raise SystemExit("sessions of a job that has ended are still open")
            time.sleep(0.05)
        found = connection.execute(
            "select (select coalesce(sum(idx_tup_read), 0) from pg_stat_user_indexes"
            " where relname = 'rows') + (select coalesce(sum(seq_tup_read), 0)"
            " from pg_stat_user_tables where relname = 'rows')"
        ).fetchone()
    assert found is not None
    return int(found[0])


@contextmanager
def no_autovacuum(url: str) -> Iterator[None]:
    """Keep the server from reading rows for itself: it does so now and then, to index epochs."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("alter system set autovacuum = off")
        connection.execute("select pg_reload_conf()")
        while connection.execute(
            "select count(*) from pg_stat_activity where backend_type like 'autovacuum %'"
        ).fetchone() != (0,):
            time.sleep(0.05)
        try:
            yield
        finally:
            connection.execute("alter system reset autovacuum")
            connection.execute("select pg_reload_conf()")
