"""The description of the HTTP API, in OpenAPI 3.1: each module of routes says its own part.

Always true here:
- a route under /api/ (and /metrics) is described, and what is described is a route: a test
  compares them;
- what each request may be refused for (no token, too large, too many) is added here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Schema = dict[str, Any]
Docs = dict[str, dict[str, Any]]
"""{path: {method: operation}}, as OpenAPI has it."""

STRING: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
ANYTHING: Final[Schema] = {}

ERROR: Final[Schema] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "next"],
            "additionalProperties": False,
            "properties": {"code": STRING, "message": STRING, "next": STRING},
        }
    },
}
_REFUSALS: Final = (400, 401, 413, 414, 421, 429)
_WITH_BODY: Final = (403, 408, 413, 415)
_MEANING: Final = {
    400: "The request does not fit",
    401: "No token, or a wrong one",
    403: "Not allowed here",
    404: "There is no such thing",
    408: "The body did not come in time",
    409: "Not as things are now",
    410: "The epoch is not kept any more",
    413: "The body is too large",
    414: "The URL is too long",
    415: "The body is not JSON",
    421: "Asked for under a name that is not this server's",
    429: "Too many requests at once: come again after Retry-After seconds",
    503: "No epoch is committed yet: come again after Retry-After seconds",
}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def objekt(**properties: Schema) -> Schema:
    """An object with at least these."""
    return {"type": "object", "required": list(properties), "properties": properties}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def query(name: str, schema: Schema, says: str = "", *, required: bool = False) -> Schema:
    return {
        "name": name, "in": "query", "schema": schema, "description": says, "required": required,
    }  # fmt: skip


def path(name: str, schema: Schema = STRING, says: str = "") -> Schema:
    return {"name": name, "in": "path", "schema": schema, "description": says, "required": True}


def operation(
    summary: str,
    *,
    parameters: Sequence[Schema] = (),
    body: Schema | None = None,
    answer: Schema | None = None,
    status: int = 200,
    errors: Iterable[int] = (),
    content_type: str = "application/json",
    control: bool = False,
) -> dict[str, Any]:
    """One operation. `answer` is the schema of its success, `errors` what else it may say."""
    refused = {*errors, *_REFUSALS, *(_WITH_BODY if body is not None else ())}
    said: dict[str, Any] = {
        "summary": summary,
        "responses": {
            str(status): {
                "description": "Done" if body is not None else "What was asked for",
                "content": {content_type: {"schema": STRING if answer is None else answer}},
            },
            **{str(code): {"$ref": f"#/components/responses/{code}"} for code in sorted(refused)},
        },
    }
    if parameters:
        said["parameters"] = list(parameters)
    if body is not None:
        said["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": body}}
        }  # fmt: skip
    if control:
        said["security"] = [{"control": []}]
    return said


def described(docs: Iterable[Mapping[str, Any]], *, version: str, has_token: bool) -> Schema:
    """All of it, as one document."""
    paths: Docs = {}
    for each in docs:
        for where, item in each.items():
            paths.setdefault(where, {}).update(item)
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "cairn",
            "version": version,
            "description": "The state of a job, its epochs, and what changes it.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "responses": {
                str(code): {"description": says, "content": error}
                for code, says in _MEANING.items()
            },
            "securitySchemes": {
                "read": {"type": "http", "scheme": "bearer"},
                "control": {"type": "http", "scheme": "bearer"},
            },
        },
    }
    if has_token:
        document["security"] = [{"read": []}]
    return document
