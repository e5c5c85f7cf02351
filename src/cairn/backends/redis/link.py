"""The way to a Redis server with state: its address, and connections that are made again.

Always true here:
- a password is in no address, message, log or repr: it comes from the job's URL or from the
  environment variable REDISCLI_AUTH of the process, as redis-cli reads it;
- an error of a server that cannot be reached, or is full, has the fact `is_away`: the job waits;
- a server that may evict keys is refused, and so is a Redis Cluster.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from cairn.errors import EpochError, PlanError
from cairn.logs import logger

T = TypeVar("T")
SCHEMES: Final = ("redis", "rediss")
PASSWORD_VARIABLE: Final = "REDISCLI_AUTH"
CONNECT_TIMEOUT_S: Final = 5
ANSWER_TIMEOUT_S: Final = 10
"""Defaults: `socket_connect_timeout` and `socket_timeout` in the URL have other values."""
_SECRETS: Final = ("password", "ssl_password")
_AWAY: Final = ("BUSY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY")
"""First words of errors. The client has classes for some, and cuts their words off."""
_known: dict[str, str] = {}
"""URLs with secrets, by address: of the servers that this process was given a URL of."""


def check_installed() -> None:
    """Refuse to go on without the client."""
    try:
        import redis  # noqa: F401
    except ImportError as error:
        raise PlanError(
            f"state in Redis needs the package redis, which cannot be imported: {error}\n"
            "  next: pip install 'cairn-state[redis]', also where the executors run"
        ) from None


def address_of(url: str) -> str:
    """Return a URL without its secrets, and remember them for this process."""
    check_installed()
    import redis

    try:
        parts = urlsplit(url)
        redis.connection.parse_url(url)
        user = f"{parts.username}@" if parts.username else ""
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        if parts.scheme not in SCHEMES or not host:
            raise ValueError(parts.scheme)
        query = urlencode([(n, v) for n, v in parse_qsl(parts.query) if n not in _SECRETS])
        address = urlunsplit((parts.scheme, f"{user}{host}{port}", parts.path, query, ""))
    except (ValueError, TypeError):
        raise PlanError(
            "the URL of the backend cannot be read (it is not shown: it may hold a password)\n"
            "  expected: 'redis://user@host:6379/0' or 'rediss://…'"
        ) from None
    if url != address:
        _known[address] = url
    return address


def describe(address: str) -> str:
    """Return an address for people."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Link:
    """One connection, used by one thread at a time."""

    def __init__(self, address: str, label: str) -> None:
        self._address = address
        self._label = label
        self._lock = threading.RLock()
        self._client: Any = None
        self._is_checked = False
        self._is_closed = False

    @property
    def where(self) -> str:
        """The address for people."""
        return describe(self._address)

    def run(self, work: Callable[[Any], T]) -> T:
        """Call `work` with a client; a lost connection is made again once."""
        check_installed()
        import redis

        with self._lock:
            assert not self._is_closed, "the link is closed"
            try:
                return work(self._connect())
            except redis.AuthenticationError as error:
                raise PlanError(
                    f"Redis refuses the user or the password: {describe(self._address)}\n"
                    f"  cause: {error}\n"
                    f"  next: set the password in the job's URL or in {PASSWORD_VARIABLE}"
                ) from None
            except redis.RedisError as error:
                if is_away(error):
                    raise self.away_error(error) from None
                raise

    def call(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one round trip, and return their answers."""
        return self.run(lambda client: _call(client, commands))

    def away_error(self, error: Exception) -> EpochError:
        import redis

        where = describe(self._address)
        is_gone = isinstance(error, redis.ConnectionError | redis.TimeoutError)
        why = "cannot be reached" if is_gone else "refuses commands now"
        return EpochError(
            f"the Redis server with the job's state {why}: {where}\n"
            f"  cause: {type(error).__name__}: {_first_line(error)}\n"
            "  next: repair the server; the job waits for it, and nothing is lost",
            database=where,
            is_away=True,
        )

    def _connect(self) -> Any:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        if self._client is None:
            password = os.environ.get(PASSWORD_VARIABLE)
            given = {} if password is None else {"password": password}
            self._client = redis.Redis.from_url(
                _known.get(self._address, self._address),
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=ANSWER_TIMEOUT_S,
                # Once, for a connection that broke while idle. The caller handles the rest, and a
                # server that hangs is not waited for twice.
                retry=Retry(NoBackoff(), 1, (redis.ConnectionError,)),
                client_name=self._label.replace(" ", "_"),
                **given,
            )
        if not self._is_checked:
            self._check(self._client)
            self._is_checked = True
        return self._client

    def _check(self, client: Any) -> None:
        """Refuse a server that does not keep what it was given."""
        import redis

        where = describe(self._address)
        try:
            policy = client.config_get("maxmemory-policy").get("maxmemory-policy")
        except redis.ResponseError:
            policy = _info(client, "memory").get("maxmemory_policy")
        if policy is None:
            logger.warning(
                "cairn cannot see whether %s evicts keys: CONFIG and INFO are not allowed\n"
                "  next: make sure that maxmemory-policy is noeviction",
                where,
            )
        elif policy != "noeviction":
            raise PlanError(
                f"the Redis server {where} may evict state\n"
                f"  expected: maxmemory-policy noeviction\n  found: {policy}\n"
                "  next: CONFIG SET maxmemory-policy noeviction, or use another server"
            )
        if _info(client, "cluster").get("cluster_enabled"):
            raise PlanError(
                f"the Redis server {where} is part of a Redis Cluster\n"
                "  expected: one server, or a primary with replicas\n"
                "  next: use a single server; several jobs may share it"
            )

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
            if client is not None:
                client.close()


def _call(client: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Send commands in one pipeline, in no transaction."""
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        # Not raised by the client: its message would quote the command, with rows of state.
        answers: list[Any] = pipe.execute(raise_on_error=False)
    return answers


def _info(client: Any, section: str) -> dict[str, Any]:
    import redis

    try:
        found: dict[str, Any] = client.info(section)
    except redis.ResponseError:
        return {}
    return found


def is_away(error: Exception) -> bool:
    """True if the server cannot be reached or does not take writes now."""
    import redis

    if isinstance(
        error,
        redis.ConnectionError
        | redis.TimeoutError
        | redis.ReadOnlyError
        | redis.OutOfMemoryError
        | redis.exceptions.ClusterDownError,  # And of a replica without its primary.
    ):
        return not isinstance(error, redis.AuthenticationError)
    if not isinstance(error, redis.ResponseError):
        return False
    # Before Redis 7, the error of a script quotes that of the command.
    text = str(error)
    return text.startswith(_AWAY) or any(f": -{word} " in text for word in _AWAY)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def check_server(url: str) -> None:
    """Refuse a URL that cannot be read, and a server that would lose state if it can be asked."""
    link = Link(address_of(url), "cairn:start")
    try:
        link.run(lambda client: client.ping())
    except EpochError:
        pass  # Away now: the job waits for it.
    finally:
        link.close()
