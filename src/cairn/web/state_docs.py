"""Bodies of requests for state, their limits, and the OpenAPI description of the routes."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from cairn.web.answers import EPOCH_MAX, EpochNumber, body_schema
from cairn.web.openapi import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    STRING,
    Docs,
    array,
    nullable,
    objekt,
    operation,
    path,
    query,
)

SCAN_ROWS_MAX: Final = 1000
KEYS_MAX: Final = 1000
SQL_ROWS_MAX: Final = 10_000
SQL_CHARS_MAX: Final = 20_000
DIFF_ROWS_MAX: Final = 1000
KEY_CHARS_MAX: Final = 4096


class Lookup(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[Any], msgspec.Meta(max_length=KEYS_MAX)]
    epoch: EpochNumber | None = None


class Sql(msgspec.Struct, forbid_unknown_fields=True):
    sql: Annotated[str, msgspec.Meta(min_length=1, max_length=SQL_CHARS_MAX)]
    epoch: EpochNumber | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=SQL_ROWS_MAX)] = 1000


_EPOCH: Final = INTEGER | {"minimum": 1, "maximum": EPOCH_MAX}
_COLUMNS: Final = array(objekt(name=STRING, type=STRING))
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
            answer=objekt(
                epoch=INTEGER,
                job=STRING,
                states=array(
                    objekt(
                        operator=STRING, state=STRING, kind=STRING, scope=STRING,
                        keys=array(STRING), columns=_COLUMNS, rows=INTEGER,
                    )
                ),
            ),
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
            answer=objekt(
                operator=STRING, state=STRING, kind=STRING, epoch=INTEGER, columns=_COLUMNS,
                rows=array(objekt()), after=nullable(STRING),
            ),
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
            answer=objekt(
                operator=STRING, state=STRING, kind=STRING, epoch=INTEGER, source=STRING,
                key=array(ANYTHING), found=BOOLEAN, value=ANYTHING, type=nullable(STRING),
                form={"enum": ["value", "result", "accumulator"]},
            ),
            errors=_READ,
        )
    },
    "/api/state/{operator}/{state}/lookup": {
        "post": operation(
            "The values of many keys, all as of one epoch",
            parameters=_STATE,
            body=body_schema(Lookup),
            answer=objekt(
                operator=STRING, state=STRING, kind=STRING, epoch=INTEGER, source=STRING,
                type=nullable(STRING),
                answers=array(objekt(key=array(ANYTHING), found=BOOLEAN, value=ANYTHING)),
            ),
            errors=_READ,
        )
    },
    "/api/sql": {
        "post": operation(
            "An SQL query over the states of an epoch; each is a table \"operator.state\"",
            body=body_schema(Sql),
            answer=objekt(
                epoch=INTEGER, columns=_COLUMNS, rows=array(array(ANYTHING)), truncated=BOOLEAN
            ),
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
            answer=objekt(
                added=INTEGER, changed=INTEGER, removed=INTEGER, keys=array(STRING),
                rows=array(objekt(change=STRING, key=array(ANYTHING))), truncated=BOOLEAN,
            ),
            errors=_READ,
        )
    },
}  # fmt: skip
