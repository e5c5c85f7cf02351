"""Ask a job that is served elsewhere: its state, its epochs; and change it, with the token.

    with cairn.client("http://10.0.0.7:8080", token=...) as job:
        job.query("fraud", "spent", "alice").value

Of a group of drivers, give the addresses of all: requests go to the one that leads, and reads wait
for a fail-over.

Always true here:
- values come back in their Python types, as the state's `get()` gives them; of aggregating
  state only the run can make those: of an epoch that is asked for by its number, and without
  a run, they are the accumulators;
- an answer names the epoch it is of; answers to `query_many` are all of one epoch, and all
  results or all accumulators;
- a request that only reads is sent again when the connection breaks or the server is busy; one
  that changes the job goes to one driver that accepts it, and is waited for as long as it takes;
- a token is sent to the addresses that were given and to no other, and never shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from cairn.errors import QueryError
from cairn.query.link import TRIES_MAX, Json, Link, encode_json
from cairn.query.live import Answer, Answers, Source
from cairn.query.lookups import Held, Key
from cairn.report.balance import Balance
from cairn.report.epoch import EpochReport

if TYPE_CHECKING:
    import pyarrow as pa

KEYS_AT_ONCE: Final = 1000
KEYS_BYTES: Final = 48 << 10
"""Limit of one request, which may have 64 KiB in all."""

_WHOLE: Final[Json] = {
    "map": dict,
    "list": list,
    "operator-list": list,
    "timers": list,
}
"""Types of a state's `get()`, where nested values are of types that cannot change."""


def client(
    url: str | Sequence[str],
    token: str | None = None,
    *,
    control_token: str | None = None,
    ca: str | None = None,
    timeout: float = 30.0,
    flight_url: str | None = None,
    failover_timeout: float = 60.0,
) -> Client:
    """A client of a job that was started with `serve=`, or of `cairn dashboard`.

    `url` is its address, or a list with the addresses of all drivers of a group: the client follows
    the leader, and looks for one for `failover_timeout` seconds. Tokens go to these addresses only.
    `control_token` is for what changes the job. `ca` is a PEM file of who signed the server's
    certificate, when it is not one that the machine knows. `flight_url` is asked for if not given.
    """
    link = Link(url, token, control_token, ca, timeout, failover_timeout)
    return Client(link, ca=ca, timeout=timeout, flight_url=flight_url)


class Client:
    """See `cairn.client`. Threads may share one: each has a connection of its own."""

    def __init__(
        self, link: Link, *, ca: str | None, timeout: float, flight_url: str | None
    ) -> None:
        self._link = link
        self._ca = ca
        self._timeout = timeout
        self._flight_url = flight_url
        self._is_found = False
        """The address was found at a leader, which may be another one by now."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<client of {self.url}>"

    @property
    def url(self) -> str:
        """The address that requests go to; of a group, that of the leader as far as is known."""
        return self._link.url

    def close(self) -> None:
        self._link.close()

    # Reading

    def job(self) -> Json:
        """The job: its name, how it goes, its newest epoch."""
        return self._link.get("/api/job")

    def leader(self) -> Json:
        """Return who leads the job and who waits; a driver that waits answers this, too."""
        return self._link.get("/api/leader")

    def epochs(self, limit: int = 100, before: int | None = None) -> list[EpochReport]:
        """Return the retained epochs in brief, newest first."""
        found = self._link.get("/api/epochs", limit=limit, before=before)
        return msgspec.convert(found["epochs"], list[EpochReport])

    def states(self, epoch: int | None = None) -> list[Json]:
        """Operators and states, with their columns."""
        states: list[Json] = self._link.get("/api/state", epoch=epoch)["states"]
        return states

    # State

    def query(self, operator: str, state: str, key: Key, epoch: int | None = None) -> Answer:
        """Return the value of a key in the last committed epoch, or in another that is kept.

        `key` is the value, or a tuple for several key columns. Of aggregating state, the result;
        with `epoch`, and from a server without the run, the accumulator.
        """
        found = self._ask(operator, state, [key], epoch)
        (answer,) = found["answers"]
        value = self._value(answer["value"], found)
        return Answer(value, found["epoch"], answer["found"], found["source"])

    def query_many(
        self, operator: str, state: str, keys: Sequence[Key], epoch: int | None = None
    ) -> Answers:
        """Return the values of many keys, all of one epoch and in one form: see `query`."""
        parts = _parts(keys)
        for _ in range(TRIES_MAX):
            found = self._ask_all(operator, state, parts, epoch)
            if found is not None:
                return found
        raise QueryError(
            f"{len(keys)} results of one epoch could not be had: the job commits another epoch "
            "before all are there\n  next: ask for fewer keys, or pass epoch= for accumulators",
            operator=operator,
            state=state,
        )

    def _ask_all(
        self, operator: str, state: str, parts: list[list[Key]], epoch: int | None
    ) -> Answers | None:
        """One request after another; None when they do not fit together."""
        values: Held = {}
        source: Source = "slot"
        first: Json | None = None
        for some in parts:
            found = self._ask(operator, state, some, epoch)
            first = first or found
            if (found["epoch"], found["form"]) != (first["epoch"], first["form"]):
                return None
            if found["form"] != "result":
                # By its number it stays, whatever the job does; results are of the newest only.
                epoch = found["epoch"]
            source = found["source"] if source == "slot" else source
            for key, answer in zip(some, found["answers"], strict=True):
                if answer["found"]:
                    values[key] = self._value(answer["value"], found)
        assert first is not None
        return Answers(first["epoch"], values, source)

    def scan(
        self, operator: str, state: str, epoch: int | None = None, *, limit: int | None = None
    ) -> Iterator[Json]:
        """The rows of a state, one by one, all of one epoch. For all of a large one: `table`."""
        after: str | None = None
        left = limit
        while left is None or left > 0:
            size = 1000 if left is None else min(left, 1000)
            path = f"/api/state/{_part(operator)}/{_part(state)}"
            found = self._link.get(path, epoch=epoch, limit=size, after=after)
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

        found = self._link.post("/api/sql", {"sql": sql, "epoch": epoch, "limit": limit})
        types = [_type(column["type"]) for column in found["columns"]]
        columns = [
            pa.array([_python(row[at], type) for row in found["rows"]], type)
            for at, type in enumerate(types)
        ]
        return pa.Table.from_arrays(columns, names=[c["name"] for c in found["columns"]])

    def table(self, operator: str, state: str, epoch: int | None = None) -> pa.Table:
        """All rows of a state, by Arrow Flight: for bulk."""
        from cairn.query.bulk import read_table

        bearer = self._link.bearer
        headers = [] if bearer is None else [(b"authorization", bearer.encode())]
        ca = None if self._ca is None else _bytes_of(self._ca)
        table: pa.Table = read_table(
            self._flight(), operator, state, epoch, headers=headers, ca=ca, timeout=self._timeout
        )
        return table

    # Changing the job

    def savepoint(self, name: str | None = None) -> Json:
        """Write the newest committed epoch to a folder of its own; its url, epoch and size."""
        return self._link.control("savepoint", {"name": name})

    def rescale(self, parallelism: int) -> None:
        """From the next epoch on, run with this many subtasks."""
        self._link.control("rescale", {"parallelism": parallelism})

    def rebalance(self) -> Balance:
        """From the next epoch on, cut the ranges of key groups by their load."""
        return msgspec.convert(self._link.control("rebalance", {}), Balance)

    def handover(self, to: str | None = None) -> Json:
        """Pass the lead to a standby, named by host or identity; return that standby.

        The leader finishes its epoch first. The answer does not wait for the takeover.
        """
        successor: Json = self._link.control("handover", {"to": to})["successor"]
        return successor

    def stop(self, savepoint: str | None = None) -> Json:
        """End the run after the epoch under way; with `savepoint`, a name, write one then."""
        return self._link.control("stop", {"savepoint": savepoint})

    # Requests

    def _ask(self, operator: str, state: str, keys: Sequence[Key], epoch: int | None) -> Json:
        from cairn.types.codec.json_values import loose_json

        path = f"/api/state/{_part(operator)}/{_part(state)}/lookup"
        return self._link.post(path, {"keys": [loose_json(key) for key in keys], "epoch": epoch})

    def _value(self, value: Any, found: Json) -> Any:
        python = _python(value, None if found["type"] is None else _type(found["type"]))
        whole = _WHOLE.get(found["kind"])
        return python if whole is None or python is None else whole(python)

    def _flight(self) -> str:
        if self._flight_url is None or self._is_found:
            port = self._link.get("/api/state").get("flight_port")
            if port is None:
                raise QueryError(
                    "this server does not serve whole states\n"
                    "  next: start the job with serve=cairn.Serve(flight=True)"
                )
            scheme = "grpc+tls" if self.url.startswith("https") else "grpc+tcp"
            host = self._link.host
            shown = f"[{host}]" if ":" in host else host
            self._flight_url = f"{scheme}://{shown}:{port}"
            self._is_found = self._link.is_group
        return self._flight_url


def _parts(keys: Sequence[Key]) -> list[list[Key]]:
    """The keys, cut to what one request takes; without any there is one part, an empty one."""
    from cairn.types.codec.json_values import loose_json

    parts: list[list[Key]] = [[]]
    size = 0
    for key in keys:
        key_bytes = len(encode_json(loose_json(key))) + 1
        if len(parts[-1]) == KEYS_AT_ONCE or (parts[-1] and size + key_bytes > KEYS_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(key)
        size += key_bytes
    return parts


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
    from cairn.types.codec.json_values import python_value

    return value if type is None else python_value(value, type)


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
