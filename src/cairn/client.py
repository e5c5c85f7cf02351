"""Ask a job that is served elsewhere: its state, its epochs; and change it, with the token.

    with cairn.client("http://10.0.0.7:8080", token=...) as job:
        job.query("fraud", "spent", "alice").value

Always true here:
- values come back in their Python types, as the state's `get()` gives them;
- an answer names the epoch it is of; answers to `query_many` are all of one epoch;
- a request that only reads is sent again when the connection breaks or the server is busy;
  one that changes the job never is;
- a token is sent to the address that was given and to no other, and never shown.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, urlencode, urlsplit

from cairn.errors import (
    CairnError,
    EpochError,
    QueryError,
    StaleEpochError,
    StateNotFoundError,
)
from cairn.query.live import Answer, Answers, Source

if TYPE_CHECKING:
    import pyarrow as pa

TRIES_MAX: Final = 6
WAIT_S: Final = 0.05
KEYS_AT_ONCE: Final = 1000

_WHOLE: Final[dict[str, Any]] = {
    "map": dict,
    "list": list,
    "operator-list": list,
    "timers": list,
}
"""What a state's `get()` gives, where values inside of others are of a kind that cannot change."""
_BUSY: Final = (429, 503)
_ERRORS: Final[dict[int, type[CairnError]]] = {
    404: StateNotFoundError,
    409: EpochError,
    410: StaleEpochError,
}


def client(
    url: str,
    token: str | None = None,
    *,
    control_token: str | None = None,
    ca: str | None = None,
    timeout: float = 30.0,
    flight_url: str | None = None,
) -> Client:
    """A client of a job that was started with `serve=`, or of `cairn dashboard`.

    `control_token` is for what changes the job. `ca` is a PEM file of who signed the server's
    certificate, when it is not one that the machine knows. `flight_url` is asked for if not given.
    """
    return Client(
        url, token, control_token=control_token, ca=ca, timeout=timeout, flight_url=flight_url
    )


class Client:
    """See `cairn.client`. Threads may share one: each has a connection of its own."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        control_token: str | None = None,
        ca: str | None = None,
        timeout: float = 30.0,
        flight_url: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise QueryError(f"a url is http://HOST:PORT, found {url!r}\n  next: see run.url")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._token = token or control_token
        self._control_token = control_token
        self._ca = ca
        self._tls = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=ca)
        self._timeout = timeout
        self._flight_url = flight_url
        self._mine = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<client of {self.url}>"

    def close(self) -> None:
        with self._lock:
            connections, self._connections = self._connections, []
        self._mine = threading.local()
        for connection in connections:
            connection.close()

    # What there is

    def job(self) -> dict[str, Any]:
        """The job: its name, how it goes, its newest epoch."""
        return self._get("/api/job")

    def epochs(self, limit: int = 100, before: int | None = None) -> list[dict[str, Any]]:
        """The retained epochs, newest first."""
        found = self._get("/api/epochs", limit=limit, before=before)
        epochs: list[dict[str, Any]] = found["epochs"]
        return epochs

    def states(self, epoch: int | None = None) -> list[dict[str, Any]]:
        """Operators and states, with their columns."""
        states: list[dict[str, Any]] = self._get("/api/state", epoch=epoch)["states"]
        return states

    # State

    def query(self, operator: str, state: str, key: Any, epoch: int | None = None) -> Answer:
        """What a key has: as of the last committed epoch, or of another that is kept.

        `key` is the value, or a tuple for several key columns.
        """
        found = self._ask(operator, state, [key], epoch)
        (answer,) = found["answers"]
        value = self._value(answer["value"], found)
        return Answer(value, found["epoch"], answer["found"], found["source"])

    def query_many(
        self, operator: str, state: str, keys: Sequence[Any], epoch: int | None = None
    ) -> Answers:
        """What many keys have, all as of one epoch."""
        values: dict[Any, Any] = {}
        source: Source = "slot"
        # Beyond what one request takes, the epoch of the first is asked for by its number.
        for at in range(0, max(len(keys), 1), KEYS_AT_ONCE):
            some = keys[at : at + KEYS_AT_ONCE]
            found = self._ask(operator, state, some, epoch)
            epoch = found["epoch"]
            source = found["source"]
            for key, answer in zip(some, found["answers"], strict=True):
                if answer["found"]:
                    values[key] = self._value(answer["value"], found)
        assert epoch is not None
        return Answers(epoch, values, source)

    def scan(
        self, operator: str, state: str, epoch: int | None = None, *, limit: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """The rows of a state, one by one, all of one epoch. For all of a large one: `table`."""
        after: str | None = None
        left = limit
        while left is None or left > 0:
            size = 1000 if left is None else min(left, 1000)
            path = f"/api/state/{_part(operator)}/{_part(state)}"
            found = self._get(path, epoch=epoch, limit=size, after=after)
            types = [(column["name"], _type(column["type"])) for column in found["columns"]]
            for row in found["rows"]:
                yield {name: _python(row[name], type) for name, type in types}
            left = None if left is None else left - len(found["rows"])
            after, epoch = found["after"], found["epoch"]
            if after is None:
                return

    def sql(self, sql: str, epoch: int | None = None, *, limit: int = 1000) -> pa.Table:
        """A query over the states of an epoch; each is a table "operator.state"."""
        import pyarrow as pa

        found = self._post("/api/sql", {"sql": sql, "epoch": epoch, "limit": limit})
        types = [_type(column["type"]) for column in found["columns"]]
        columns = [
            pa.array([_python(row[at], type) for row in found["rows"]], type)
            for at, type in enumerate(types)
        ]
        return pa.Table.from_arrays(columns, names=[c["name"] for c in found["columns"]])

    def table(self, operator: str, state: str, epoch: int | None = None) -> pa.Table:
        """All rows of a state, by Arrow Flight: for bulk."""

        from cairn.query.bulk import read_table

        headers = [] if self._token is None else [(b"authorization", self._bearer().encode())]
        ca = None if self._ca is None else _bytes_of(self._ca)
        table: pa.Table = read_table(self._flight(), operator, state, epoch, headers=headers, ca=ca)
        return table

    # What changes the job

    def savepoint(self, name: str | None = None) -> dict[str, Any]:
        """Write the newest committed epoch to a folder of its own; its url, epoch and size."""
        return self._control("savepoint", {"name": name})

    def rescale(self, parallelism: int) -> None:
        """From the next epoch on, run with this many subtasks."""
        self._control("rescale", {"parallelism": parallelism})

    def stop(self, savepoint: str | None = None) -> dict[str, Any]:
        """End the run after the epoch under way; with `savepoint`, a name, write one then."""
        return self._control("stop", {"savepoint": savepoint})

    # How

    def _ask(
        self, operator: str, state: str, keys: Sequence[Any], epoch: int | None
    ) -> dict[str, Any]:
        from cairn.codec.loose_json import loose_json

        path = f"/api/state/{_part(operator)}/{_part(state)}/lookup"
        return self._post(path, {"keys": [loose_json(key) for key in keys], "epoch": epoch})

    def _value(self, value: Any, found: dict[str, Any]) -> Any:
        python = _python(value, None if found["type"] is None else _type(found["type"]))
        whole = _WHOLE.get(found["kind"])
        return python if whole is None or python is None else whole(python)

    def _flight(self) -> str:
        if self._flight_url is None:
            port = self._get("/api/state").get("flight_port")
            if port is None:
                raise QueryError(
                    "this server does not serve whole states\n"
                    "  next: start the job with serve=cairn.Serve(flight=True)"
                )
            scheme = "grpc+tcp" if self._tls is None else "grpc+tls"
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._flight_url = f"{scheme}://{host}:{port}"
        return self._flight_url

    def _get(self, path: str, **query: Any) -> dict[str, Any]:
        given = {name: value for name, value in query.items() if value is not None}
        return self._request("GET", f"{path}?{urlencode(given)}" if given else path)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", path, body)

    def _control(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._control_token is None:
            raise QueryError(
                "this client has no control token\n  next: cairn.client(url, control_token=...)"
            )
        # On a connection of its own: one that the server has let go would look like a failure.
        self._drop()
        return self._request("POST", f"/api/control/{what}", body, is_control=True)

    def _bearer(self, *, is_control: bool = False) -> str:
        return f"Bearer {self._control_token if is_control else self._token}"

    def _request(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: dict[str, Any] | None = None,
        *,
        is_control: bool = False,
    ) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = self._bearer(is_control=is_control)
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        for left in reversed(range(TRIES_MAX)):
            try:
                status, text = self._once(method, path, data, headers)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if left == 0 or is_control:
                    raise QueryError(
                        f"{self.url} does not answer: {error or type(error).__name__}\n"
                        "  next: is the job running, and the address right? see run.url"
                    ) from error
            else:
                if status not in _BUSY or left == 0 or is_control:
                    return _answer(status, text)
            time.sleep(WAIT_S * 2 ** (TRIES_MAX - 1 - left) * random.uniform(0.5, 1.5))
        raise AssertionError("the last try returns or raises")

    def _once(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        connection = self._connection()
        connection.request(method, self._prefix + path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._mine, "connection", None)
        if connection is None:
            if self._tls is None:
                connection = http.client.HTTPConnection(
                    self._host, self._port, timeout=self._timeout
                )
            else:
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout, context=self._tls
                )
            self._mine.connection = connection
            with self._lock:
                self._connections.append(connection)
        return connection

    def _drop(self) -> None:
        connection = getattr(self._mine, "connection", None)
        if connection is not None:
            connection.close()  # The next request opens it anew.


def _answer(status: int, text: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
        if status < 300:
            return found
        error = found["error"]
        message = f"{error['message']}\n  next: {error['next']}"
        code = error["code"]
    except (ValueError, KeyError, TypeError):
        raise QueryError(
            f"the server answered {status}, and not as cairn does\n  next: is the address right?",
            status=status,
        ) from None
    raise _ERRORS.get(status, QueryError)(message, status=status, code=code)


def _part(name: str) -> str:
    return quote(name, safe="")


def _type(ddl: str) -> Any:
    from cairn.errors import PlanError
    from cairn.types import parse_type

    try:
        return parse_type(ddl)
    except PlanError:
        return None  # Not one of ours, such as SQL may make: as JSON has it.


def _python(value: Any, type: Any) -> Any:
    from cairn.codec.json_values import python_value

    return value if type is None else python_value(value, type)


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
