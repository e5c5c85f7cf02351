"""The description of the HTTP API, in OpenAPI 3.1: each module of routes describes its own.

The schema of an answer is generated from the struct that the route encodes.

Always true here:
- the described routes are those under /api/ and /metrics: a test compares them;
- the refusals that any request may get (no token, too large, too many) are added here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

Schema = dict[str, Any]


class Operation(NamedTuple):
    """A description, and the schemas that it refers to by name."""

    description: Schema
    schemas: Schema


Docs = dict[str, dict[str, Operation]]
"""{path: {method: operation}}"""

STRING: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}

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
    400: "The request is not valid",
    401: "No token, or a wrong one",
    403: "Not allowed here",
    404: "Not found",
    408: "The body did not come in time",
    409: "Not possible in the present state of the job",
    410: "The epoch is not kept any more",
    413: "The body is too large",
    414: "The URL is too long",
    415: "The body is not JSON",
    421: "The host name is not one of this server's",
    429: "Too many requests at once: try again after Retry-After seconds",
    503: "No epoch is committed yet: try again after Retry-After seconds",
}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def objekt(**properties: Schema) -> Schema:
    """Return the schema of an object with at least these properties."""
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
    body: type[msgspec.Struct] | None = None,
    answer: Schema | type[msgspec.Struct] = STRING,
    status: int = 200,
    errors: Iterable[int] = (),
    content_type: str = "application/json",
    control: bool = False,
) -> Operation:
    """Describe an operation by its body, its answer and its errors."""
    refused = {*errors, *_REFUSALS, *(_WITH_BODY if body is not None else ())}
    shapes = [shape for shape in (body, answer) if isinstance(shape, type)]
    template = "#/components/schemas/{name}"
    refs, schemas = msgspec.json.schema_components(shapes, ref_template=template)
    description: Schema = {
        "summary": summary,
        "responses": {
            str(status): {
                "description": "Done" if body is not None else "The answer",
                "content": {
                    content_type: {"schema": refs[-1] if isinstance(answer, type) else answer}
                },
            },
            **{str(code): {"$ref": f"#/components/responses/{code}"} for code in sorted(refused)},
        },
    }
    if parameters:
        description["parameters"] = list(parameters)
    if body is not None:
        description["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": refs[0]}}
        }  # fmt: skip
    if control:
        description["security"] = [{"control": []}]
    return Operation(description, schemas)


def describe(docs: Iterable[Docs], *, version: str, has_token: bool) -> Schema:
    """Return all of it as one document."""
    paths: dict[str, Schema] = {}
    schemas: Schema = {"Error": ERROR}
    for each in docs:
        for where, item in each.items():
            for method, (description, named) in item.items():
                paths.setdefault(where, {})[method] = description
                schemas |= named
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
            "schemas": schemas,
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
