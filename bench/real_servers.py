"""The servers for benchmarks: those of the tests, with durable settings."""

from __future__ import annotations

import sys
import time
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
    """Return how many rows of state the sessions that have ended have read from a database."""
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
        # Slots read by index only. Autovacuum reads all rows now and then, for the index of epochs.
        found = connection.execute(
            "select coalesce(sum(idx_tup_read), 0) from pg_stat_user_indexes where relname = 'rows'"
        ).fetchone()
    assert found is not None
    return int(found[0])
