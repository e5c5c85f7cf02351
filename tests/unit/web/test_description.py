"""The description is true, and nothing that fits it or not makes the server fail, leak or write.

Schemathesis makes requests from the description: ones that fit, and ones that do not.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from starlette.routing import Route

from cairn.web.app import description, make_app
from tests.unit.web.sites import (
    CONTROL,
    TOKEN,
    FakeRun,
    content,
    make_checkpoint,
    site_of,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    ignored_auth,
    unsupported_method,
]
FOLDER = Path(tempfile.mkdtemp(prefix="cairn-described-")) / "ckpt"
CHECKPOINT = make_checkpoint(FOLDER)
BEFORE = content(FOLDER.parent)
# Not on loopback, where the name that requests are sent to would matter.
SITE = site_of(
    CHECKPOINT,
    FakeRun(CHECKPOINT),
    address="0.0.0.0:0",
    token=TOKEN,
    control_token=CONTROL,
    requests_per_s=1e9,
)
APP = make_app(SITE)
HEADERS = {"Authorization": f"Bearer {CONTROL}"}
REFUSALS = [400, 401, 403, 404, 405, 409, 410, 413, 414, 415]
CONFIG = schemathesis.Config.from_dict(
    {
        # The same requests each time: who wants others changes it.
        "seed": 6,
        "checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}},
    }
)
SCHEMA = schemathesis.openapi.from_asgi("/api/openapi.json", APP, headers=HEADERS, config=CONFIG)
# It never ends; tests of the server listen to it.
SCHEMA = SCHEMA.exclude(path="/api/events")


def test_every_route_is_described_and_what_is_described_is_a_route() -> None:
    served = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in APP.routes
        if isinstance(route, Route) and route.path.startswith(("/api/", "/metrics"))
        for method in route.methods or ()
        if method != "HEAD"
    }
    described = {
        (path, method) for path, item in description(SITE)["paths"].items() for method in item
    }
    assert served == described


def test_names_in_a_path_are_described() -> None:
    for path, item in description(SITE)["paths"].items():
        for operation in item.values():
            given = [p["name"] for p in operation.get("parameters", []) if p["in"] == "path"]
            assert given == re.findall(r"{(\w+)}", path), path


def test_description_says_that_a_token_is_needed_only_where_one_is() -> None:
    assert "security" in description(SITE)
    assert "security" not in description(site_of(CHECKPOINT))


FEW = hypothesis.settings(
    max_examples=min(15, int(os.environ.get("CAIRN_EXAMPLES", "5"))),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)


@SCHEMA.parametrize()
@FEW
def test_no_request_makes_the_server_fail_or_leak(case: Any) -> None:
    response = case.call(headers=HEADERS)
    case.validate_response(response, checks=CHECKS, headers=HEADERS)
    check_leaks_nothing(response.text)


@SCHEMA.include(path_regex="operator").parametrize()
@FEW
def test_no_request_for_a_state_that_is_there_makes_the_server_fail_or_leak(case: Any) -> None:
    # Made-up names do not get far.
    case.path_parameters |= {"operator": "count", "state": "n"}
    case.query = {name: value for name, value in (case.query or {}).items() if name != "epoch"}
    response = case.call(headers=HEADERS)
    case.validate_response(response, checks=CHECKS[:4], headers=HEADERS)
    check_leaks_nothing(response.text)


TRICKS = [
    "/../../../../etc/passwd",
    "/..%2f..%2f..%2fetc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/static/../app.py",
    "/static/%2e%2e/app.py",
    "/static/..%2fapp.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/..%5c..%5capp.py",
    "/static/%00",
    "/api/state/..%2f..%2fjob.json/n",
    "/api/state/count/n%00",
    "/api/state/count/%2e%2e",
    "/api/state/count/n/%00",
    "/api/state/count/n/" + "9" * 5000,
    "/api/state/count/n/%ff%fe",
    "/api/state/count/n/\u202e\U0001f4a3",
    "/api/state/" + "a" * 3000 + "/n",
    "/api/epochs/..%2f..%2fjob",
    "/api/epochs/%EF%BC%91",
    "/api/groups?operator=..%2f..%2fetc&epoch=1e9",
    "/api/diff/count/n?from=2&to=3&limit=-1",
    "/api//state",
    "//etc/passwd",
    "/login?next=//evil.example/%0d%0aSet-Cookie:x",
    "/metrics/../api/job",
]


@pytest.mark.parametrize("path", TRICKS)
@pytest.mark.parametrize("token", [TOKEN, None])
def test_path_tricks_reach_nothing(path: str, token: str | None) -> None:
    status, headers, text = asyncio.run(answer_to(path, token))
    assert status < 500, text
    assert status in (400, 401, 404, 410) or path.startswith("/login")
    assert b"set-cookie" not in headers
    check_leaks_nothing(text.replace("/etc/passwd", ""))


async def answer_to(target: str, token: str | None) -> tuple[int, dict[bytes, bytes], str]:
    """As a server passes it on: clients would tidy the path up."""
    raw, _, query = target.encode().partition(b"?")
    given = [(b"host", b"x")]
    if token is not None:
        given.append((b"authorization", f"Bearer {token}".encode()))
    scope = {
        "type": "http", "method": "GET", "path": unquote(raw.decode()), "raw_path": raw,
        "query_string": query, "headers": given, "scheme": "http", "server": ("x", 80),
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await APP(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent).decode()
    return sent[0]["status"], dict(sent[0]["headers"]), text


@pytest.fixture(scope="module", autouse=True)
def nothing_is_written() -> Iterator[None]:
    """Whatever was asked in this module: the checkpoint and all beside it are as they were."""
    yield
    assert content(FOLDER.parent) == BEFORE


def check_leaks_nothing(text: str) -> None:
    for secret in (TOKEN, CONTROL, "Traceback", "site-packages", ".py", "root:x:0"):
        assert secret not in text
    # Of paths of this machine, only the checkpoint's own.
    for path in re.findall(r"/(?:tmp|work|usr|etc|home|root)/[^\"'\s]*", text):
        assert str(FOLDER) in path or path in ("/etc/passwd",), path
