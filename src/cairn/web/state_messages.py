"""Requests for state and their answers: bodies, limits, and the OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from cairn.web.answers import EPOCH_MAX, EpochNumber
from cairn.web.openapi import INTEGER, STRING, Docs, operation, path, query

SCAN_ROWS_MAX: Final = 1000
KEYS_MAX: Final = 1000
SQL_ROWS_MAX: Final = 10_000
SQL_CHARS_MAX: Final = 20_000
DIFF_ROWS_MAX: Final = 1000
KEY_CHARS_MAX: Final = 4096

Columns = list[dict[str, str]]
"""The `name` and the `type` of each."""
Form = Literal["value", "result", "accumulator"]


class Lookup(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[Any], msgspec.Meta(max_length=KEYS_MAX)]
    epoch: EpochNumber | None = None


class Sql(msgspec.Struct, forbid_unknown_fields=True):
    sql: Annotated[str, msgspec.Meta(min_length=1, max_length=SQL_CHARS_MAX)]
    epoch: EpochNumber | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=SQL_ROWS_MAX)] = 1000


class ListedState(msgspec.Struct):
    operator: str
    state: str
    kind: str
    scope: str
    keys: list[str]
    columns: Columns
    rows: int


class OfEpoch(msgspec.Struct, kw_only=True):
    """An answer that was read from the checkpoint."""

    epoch: int
    wall_ms: int
    source: Literal["checkpoint"] = "checkpoint"


class StateList(OfEpoch, kw_only=True):
    job: str | None
    max_parallelism: int
    flight_port: int | None
    states: list[ListedState]


class StatePage(OfEpoch, kw_only=True):
    operator: str
    state: str
    kind: str
    columns: Columns
    rows: list[dict[str, Any]]
    after: str | None
    """The cursor for the next page."""


class KeyValue(msgspec.Struct):
    key: list[Any]
    found: bool
    value: Any


class KeyAnswer(msgspec.Struct, kw_only=True):
    operator: str
    state: str
    kind: str
    epoch: int
    source: str
    type: str | None
    form: Form


class OneKey(KeyAnswer, kw_only=True):
    key: list[Any]
    found: bool
    value: Any


class ManyKeys(KeyAnswer, kw_only=True):
    answers: list[KeyValue]


class SqlResult(OfEpoch, kw_only=True):
    columns: Columns
    rows: list[tuple[Any, ...]]
    truncated: bool


class Difference(msgspec.Struct):
    change: str
    key: list[Any]
    entry: Any
    before: Any
    after: Any


class StateDifferences(msgspec.Struct):
    operator: str
    state: str
    before: int = msgspec.field(name="from")
    after: int = msgspec.field(name="to")
    keys: list[str]
    added: int
    changed: int
    removed: int
    rows: list[Difference]
    truncated: bool


_EPOCH: Final = INTEGER | {"minimum": 1, "maximum": EPOCH_MAX}
_STATE: Final = [
    path("operator", says="The uid of the operator"),
    path("state", says="The name of the state"),
]
_AT: Final = query("epoch", _EPOCH, "The epoch to read. Default: the newest committed one")
_READ: Final = (400, 404, 409, 410, 503)


def _limit(default: int, most: int, least: int = 1) -> dict[str, object]:
    return query("limit", INTEGER | {"minimum": least, "maximum": most, "default": default})


DOCS: Final[Docs] = {
    "/api/state": {
        "get": operation(
            "The operators and states of an epoch",
            parameters=[_AT],
            answer=StateList,
            errors=_READ,
        )
    },
    "/api/state/{operator}/{state}": {
        "get": operation(
            "Rows of a state in pages, all of one epoch",
            parameters=[
                *_STATE,
                _AT,
                _limit(100, SCAN_ROWS_MAX),
                query("after", STRING | {"maxLength": 200}, "`after` of the previous page"),
            ],
            answer=StatePage,
            errors=_READ,
        )
    },
    "/api/state/{operator}/{state}/{key}": {
        "get": operation(
            "The value of a key as of the last committed epoch, answered by the slots of a run",
            parameters=[
                *_STATE,
                path("key", STRING | {"maxLength": KEY_CHARS_MAX},
                     "Plain text, or a JSON array with a value per key column"),
                _AT,
            ],
            answer=OneKey,
            errors=_READ,
        )
    },
    "/api/state/{operator}/{state}/lookup": {
        "post": operation(
            "The values of many keys, all as of one epoch",
            parameters=_STATE,
            body=Lookup,
            answer=ManyKeys,
            errors=_READ,
        )
    },
    "/api/sql": {
        "post": operation(
            "An SQL query over the states of an epoch; each is a table \"operator.state\"",
            body=Sql,
            answer=SqlResult,
            errors=_READ,
        )
    },
    "/api/diff/{operator}/{state}": {
        "get": operation(
            "The differences of a state between two epochs",
            parameters=[
                *_STATE,
                query("from", _EPOCH, required=True),
                query("to", _EPOCH, required=True),
                _limit(100, DIFF_ROWS_MAX, 0),
            ],
            answer=StateDifferences,
            errors=_READ,
        )
    },
}  # fmt: skip
