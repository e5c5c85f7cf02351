"""A real S3 server for tests: moto's, in a process of its own, gone with the test.

    with s3_server() as s3:
        subprocess.run([...], env={**os.environ, **s3.env})     # or s3.in_environment()
        open_store(s3.url + "/checkpoint")

A key `until-<milliseconds>` is refused after that time, as a session token is that has expired:
`expiring` makes such keys, for `CAIRN_CREDENTIALS=tests.s3:expiring`.

moto looks whether an object exists and then writes it, in two steps that threads can come
between; `If-None-Match: *` would then have two winners. Requests that write are
therefore served one at a time.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

BUCKET = "cairn-tests"
LIFE_MS = int(os.environ.get("CAIRN_TEST_KEY_MS", "2000"))
"""Keys of `expiring` are good for this long."""
CARELESS = "careless"


class S3(NamedTuple):
    """A running server. `env` is all a process needs to use it."""

    endpoint: str
    env: dict[str, str]
    url: str

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """For this process, and for those it starts meanwhile."""
        before = {name: os.environ.get(name) for name in self.env}
        os.environ.update(self.env)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def s3_server(
    bucket: str = BUCKET, host: str = "127.0.0.1", *, is_careless: bool = False
) -> Iterator[S3]:
    """An S3 server with one empty bucket, at an address of this machine.

    A careless one ignores the conditions of puts, as some stores do.
    """
    careless = [CARELESS] if is_careless else []
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), bucket, host, *careless],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert endpoint.startswith("http://"), "the S3 server did not start"
        yield S3(endpoint, _environment(endpoint), f"s3://{bucket}")
    finally:
        process.kill()
        process.wait()


def _environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def expiring(url: str) -> Callable[[], dict[str, Any]]:
    """Return a provider of keys that the server refuses a little later."""

    def provide() -> dict[str, Any]:
        now_s = time.time()
        return {
            "access_key_id": f"until-{int(now_s * 1000) + LIFE_MS}",
            "secret_access_key": "test",
            "token": None,
            # Renewed in the second half of their life: a request may take a while.
            "expires_at": dt.datetime.fromtimestamp(now_s + LIFE_MS / 2000, dt.UTC),
        }

    provide.refresh_threshold = dt.timedelta(0)  # type: ignore[attr-defined]
    return provide


class RefuseExpired:
    """A WSGI application that refuses keys `until-<milliseconds>` after that time."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        found = re.search(r"Credential=until-(\d+)/", environ.get("HTTP_AUTHORIZATION", ""))
        if found is None or time.time() * 1000 < int(found[1]):
            return self._app(environ, start_response)
        # Else the rest of a body would be read as the next request.
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>"]


class OneWriteAtATime:
    """A WSGI application whose requests that write do not overlap."""

    def __init__(self, app: Callable[..., Iterable[bytes]], *, is_careless: bool) -> None:
        self._app = app
        self._is_careless = is_careless
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._app(environ, start_response)
        if self._is_careless:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with self._lock:
            return list(self._app(environ, start_response))


def _serve(bucket: str, host: str, kind: str = "") -> None:
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    inner = OneWriteAtATime(
        DomainDispatcherApplication(create_backend_app), is_careless=kind == CARELESS
    )
    app = RefuseExpired(inner)
    server = make_server(host, 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://{host}:{server.server_port}"
    os.environ.update(_environment(endpoint))
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    print(endpoint, flush=True)
    # Whoever started us has our stdin; when it dies, however it dies, this ends.
    sys.stdin.read()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(*sys.argv[1:])
