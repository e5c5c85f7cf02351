"""State over HTTP: lists, lookups, scans, SQL, differences.

If the run is in this process and the request names no epoch, the run answers lookups, as of the
last committed epoch. Everything else is read from the checkpoint, as of one epoch.

Always true here:
- an answer names its epoch, and all of it is of that epoch;
- an answer contains committed values only;
- lookups have threads of their own: other requests are served while slots do not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio.to_thread
import pyarrow as pa
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.errors import EpochError, StaleEpochError
from cairn.query.json_values import json_column, json_columns, json_rows
from cairn.snapshots.diff import diff_epochs
from cairn.types.codec.json_values import json_value, loose_json
from cairn.web.answers import (
    json_body,
    json_response,
    query_epoch,
    query_int,
    query_text,
)
from cairn.web.errors import ApiError
from cairn.web.reads import (
    ABSENT,
    Key,
    is_live,
    look_up,
    page,
    parse_cursor,
    parse_json_key,
    value_type,
)
from cairn.web.site import Site
from cairn.web.state_messages import (
    DIFF_ROWS_MAX,
    DOCS,
    KEY_CHARS_MAX,
    SCAN_ROWS_MAX,
    Difference,
    Form,
    KeyValue,
    ListedState,
    Lookup,
    ManyKeys,
    OneKey,
    Sql,
    SqlResult,
    StateDifferences,
    StateList,
    StatePage,
)

if TYPE_CHECKING:
    from cairn.snapshots.tables import StateSource, StateTable

__all__ = ["DOCS", "routes"]

SQL_S: Final = 10.0
DIFF_S: Final = 10.0
LOOK_UPS_MAX: Final = 24
"""Lookups at once; as many again may wait."""
NAME_CHARS_MAX: Final = 200


def routes(site: Site) -> list[Route]:
    states = _States(site)
    lookup = "/api/state/{operator}/{state}/lookup"
    return [
        Route("/api/state", states.list),
        Route("/api/state/{operator}/{state}", states.scan),
        Route(lookup, states.look_up_many, methods=["POST"]),
        Route("/api/state/{operator}/{state}/{key:path}", states.look_up),
        Route("/api/sql", states.sql, methods=["POST"]),
        Route("/api/diff/{operator}/{state}", states.diff),
    ]


class _Shape(NamedTuple):
    """The schema of a state, as of an epoch."""

    epoch: int
    table: StateTable


class _States:
    """The routes of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._shapes: dict[tuple[str, str], _Shape] = {}
        self._lock = threading.Lock()
        self._look_ups = anyio.CapacityLimiter(LOOK_UPS_MAX)
        self._looking_up = 0
        self._diffing = threading.Lock()

    def list(self, request: Request) -> Response:
        with self._site.open_state(query_epoch(request)) as source:
            return json_response(
                StateList(
                    epoch=source.epoch,
                    wall_ms=source.wall_ms,
                    job=source.job,
                    max_parallelism=source.max_parallelism,
                    flight_port=self._site.flight_port,
                    states=[
                        ListedState(
                            table.operator,
                            table.state,
                            table.kind,
                            table.scope,
                            table.key_names,
                            json_columns(table.schema),
                            table.rows,
                        )
                        for table in source.tables()
                    ],
                )
            )

    def scan(self, request: Request) -> Response:
        limit = query_int(request, "limit", default=100, least=1, most=SCAN_ROWS_MAX)
        after = query_text(request, "after", chars_max=200)
        start = None if after is None else parse_cursor(after)
        epoch = query_epoch(request)
        if start is not None and epoch not in (None, start.epoch):
            raise ApiError(
                400,
                "bad-request",
                f"after belongs to epoch {start.epoch}, but epoch is {epoch}",
                "leave epoch out",
            )
        epoch = epoch if start is None else start.epoch
        with self._site.heavy(), self._site.open_state(epoch) as source:
            table = _table(source, request)
            rows, cursor = page(table, source.epoch, start, limit)
            return json_response(
                StatePage(
                    epoch=source.epoch,
                    wall_ms=source.wall_ms,
                    operator=table.operator,
                    state=table.state,
                    kind=table.kind,
                    columns=json_columns(table.schema),
                    rows=[row for batch in rows for row in json_rows(batch)],
                    after=None if cursor is None else cursor.text(),
                )
            )

    async def _run_look_up(self, look_up: Callable[..., Response], *args: object) -> Response:
        if self._looking_up >= 2 * LOOK_UPS_MAX:
            raise ApiError(429, "busy", "Too many lookups at once", "try again in a moment")
        self._looking_up += 1
        try:
            return await anyio.to_thread.run_sync(look_up, *args, limiter=self._look_ups)
        finally:
            self._looking_up -= 1

    async def look_up(self, request: Request) -> Response:
        return await self._run_look_up(self._look_up_one, request)

    def _look_up_one(self, request: Request) -> Response:
        text = request.path_params["key"]
        if len(text) > KEY_CHARS_MAX:
            raise ApiError(400, "bad-request", f"A key has at most {KEY_CHARS_MAX} characters")
        epoch = query_epoch(request)
        table = self._table(request, epoch)
        key = table.parse_key(text)
        answer = self._look_up(table, [key], epoch)
        (found,) = answer.key_values([key])
        return json_response(
            OneKey(key=found.key, found=found.found, value=found.value, **answer.facts())
        )

    async def look_up_many(self, request: Request) -> Response:
        asked = await json_body(request, Lookup)
        return await self._run_look_up(self._look_up_many, request, asked)

    def _look_up_many(self, request: Request, asked: Lookup) -> Response:
        table = self._table(request, asked.epoch)
        keys = [parse_json_key(table, given) for given in asked.keys]
        answer = self._look_up(table, keys, asked.epoch)
        return json_response(ManyKeys(answers=answer.key_values(keys), **answer.facts()))

    async def sql(self, request: Request) -> Response:
        asked = await json_body(request, Sql)
        if not asked.sql.strip():
            raise ApiError(400, "bad-request", "sql is empty", "send a query")
        return await run_in_threadpool(self._sql, asked)

    def _sql(self, asked: Sql) -> Response:
        from cairn.query.sql import is_truncated
        from cairn.query.sql_apart import run_sql_apart

        with self._site.heavy(), self._site.open_state(asked.epoch, hold=True) as source:
            shown = run_sql_apart(source, asked.sql, rows_max=asked.limit, timeout_s=SQL_S)
            columns = [json_column(column) for column in shown.columns]
            return json_response(
                SqlResult(
                    epoch=source.epoch,
                    wall_ms=source.wall_ms,
                    columns=json_columns(shown.schema),
                    rows=list(zip(*columns, strict=True)),
                    truncated=is_truncated(shown),
                )
            )

    def diff(self, request: Request) -> Response:
        limit = query_int(request, "limit", default=100, least=0, most=DIFF_ROWS_MAX)
        before, after = query_epoch(request, "from"), query_epoch(request, "to")
        if before is None or after is None:
            raise ApiError(400, "bad-request", "from or to is missing", "give two epochs")
        operator, state = _names(request)
        for number in (before, after):
            self._check_kept(number)
        # It is plain Python, and holds up the threads of the job.
        if not self._diffing.acquire(blocking=False):
            raise ApiError(429, "busy", "Another diff is running", "try again in a moment")
        try:
            diffs = diff_epochs(
                self._site.store,
                before,
                after,
                operator=operator,
                state=state,
                limit=limit,
                check=_deadline(DIFF_S),
            )
        finally:
            self._diffing.release()
        rows = [
            Difference(
                change,
                [loose_json(part) for part in _key_parts(example.key, diff.key_names)],
                loose_json(example.entry),
                loose_json(example.before),
                loose_json(example.after),
            )
            for diff in diffs
            for change in ("added", "changed", "removed")
            for example in getattr(diff, f"{change}_examples")
        ]
        counts = {
            change: sum(getattr(diff, change) for diff in diffs)
            for change in ("added", "changed", "removed")
        }
        return json_response(
            StateDifferences(
                operator,
                state,
                before,
                after,
                diffs[0].key_names if diffs else [],
                **counts,
                rows=rows[:limit],
                truncated=sum(counts.values()) > len(rows[:limit]),
            )
        )

    def _check_kept(self, number: int) -> None:
        self._site.open_state(number).close()

    def _table(self, request: Request, epoch: int | None) -> StateTable:
        """Return the schema of the state that a request names."""
        operator, state = _names(request)
        shape = self._shapes.get((operator, state))
        if shape is not None and (epoch == shape.epoch or (epoch is None and self._is_live)):
            return shape.table
        return self._shape(operator, state, epoch).table

    @property
    def _is_live(self) -> bool:
        return self._site.run is not None

    def _shape(self, operator: str, state: str, epoch: int | None) -> _Shape:
        with self._site.open_state(epoch) as source:
            shape = _Shape(source.epoch, source.table(operator, state))
        with self._lock:
            # Only names that exist: a client could send any number of others.
            self._shapes[operator, state] = shape
        return shape

    def _look_up(self, table: StateTable, keys: Sequence[Key], epoch: int | None) -> _Answer:
        run = self._site.run
        if run is not None and epoch is None and is_live(table, keys):
            plain = keys if len(table.key_names) > 1 else [key[0] for key in keys]
            try:
                answers = run.query_many(table.operator, table.state, plain)
            except EpochError:
                pass  # Before its first epoch, or after its end: read the checkpoint.
            else:
                table = self._as_of(answers.epoch, table)
                values = [answers.values.get(key, ABSENT) for key in plain]
                is_result = table.kind == "aggregating"
                return _Answer(table, answers.epoch, answers.source, values, is_result)
        with self._site.open_state(epoch) as source:
            table = source.table(table.operator, table.state)
            return _Answer(table, source.epoch, "checkpoint", look_up(table, keys), False)

    def _as_of(self, epoch: int, table: StateTable) -> StateTable:
        """Return the schema as of an epoch: an upgrade may have changed the type."""
        shape = self._shapes.get((table.operator, table.state))
        if shape is not None and shape.epoch == epoch:
            return shape.table
        try:
            return self._shape(table.operator, table.state, epoch).table
        except StaleEpochError:
            return table  # The job has retired the epoch meanwhile.


class _Answer(NamedTuple):
    """The values of keys, as of one epoch."""

    table: StateTable
    epoch: int
    source: str
    values: list[Any]
    """In the order of the keys; ABSENT for keys without a value."""
    is_result: bool
    """Computed by a function of the job: it has no declared type."""

    @property
    def form(self) -> Form:
        if self.table.kind != "aggregating":
            return "value"
        return "result" if self.is_result else "accumulator"

    @property
    def type_name(self) -> str | None:
        if self.is_result:
            return None
        (column,) = json_columns(pa.schema([("value", value_type(self.table))]))
        return column["type"]

    def facts(self) -> dict[str, Any]:
        """Return the fields of a `KeyAnswer`."""
        return {
            "operator": self.table.operator,
            "state": self.table.state,
            "kind": self.table.kind,
            "epoch": self.epoch,
            "source": self.source,
            "type": self.type_name,
            "form": self.form,
        }

    def key_values(self, keys: Sequence[Key]) -> list[KeyValue]:
        found = []
        for key, value in zip(keys, self.values, strict=True):
            parts = zip(key, self.table.key_types, strict=True)
            texts = [json_value(part, type) for part, type in parts]
            found.append(KeyValue(texts, value is not ABSENT, self._json(value)))
        return found

    def _json(self, value: Any) -> Any:
        if value is ABSENT:
            return None
        return loose_json(value) if self.is_result else json_value(value, value_type(self.table))


def _names(request: Request) -> tuple[str, str]:
    operator, state = request.path_params["operator"], request.path_params["state"]
    if len(operator) > NAME_CHARS_MAX or len(state) > NAME_CHARS_MAX:
        raise ApiError(
            404, "not-found", "The name of the operator or state is too long", "see /api/state"
        )
    return operator, state


def _table(source: StateSource, request: Request) -> StateTable:
    return source.table(*_names(request))


def _key_parts(key: Any, names: Sequence[str]) -> Sequence[Any]:
    return key if len(names) > 1 else [key]


def _deadline(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise ApiError(
                400,
                "too-large",
                f"The diff takes longer than {seconds:g} s",
                "use cairn.diff_state, or epochs closer to each other",
            )

    return check
