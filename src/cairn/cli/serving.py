"""Settings of a server from the command line, with tokens from the environment.

Always true here:
- a token is never on a command line: every user of the machine could read it there.
"""

from __future__ import annotations

import os
import signal
import threading
import webbrowser
from types import FrameType

import typer

from cairn.cli.checkpoint import open_checkpoint
from cairn.driver.serving import DEFAULT_ADDRESS, Serve
from cairn.errors import PlanError

TOKEN = "CAIRN_TOKEN"
CONTROL_TOKEN = "CAIRN_CONTROL_TOKEN"
CERTIFICATE = "CAIRN_TLS_CERTIFICATE"
KEY = "CAIRN_TLS_KEY"
PUBLIC_URL = "CAIRN_PUBLIC_URL"
_POLL_S = 0.5


def serve_settings(address: str | None) -> Serve:
    """Return settings for HOST:PORT, a PORT of this machine, or any free one."""
    address = address or DEFAULT_ADDRESS
    if address.isdecimal():
        address = f"127.0.0.1:{address}"
    certificate, key = os.environ.get(CERTIFICATE), os.environ.get(KEY)
    if (certificate is None) != (key is None):
        raise PlanError(
            f"serve: {CERTIFICATE} and {KEY} must both be set\n"
            f"  found: only {CERTIFICATE if key is None else KEY}\n"
            "  next: set both, or neither"
        )
    return Serve(
        address=address,
        token=os.environ.get(TOKEN) or None,
        control_token=os.environ.get(CONTROL_TOKEN) or None,
        tls=None if certificate is None or key is None else (certificate, key),
        public_url=os.environ.get(PUBLIC_URL) or None,
    )


def show_dashboard(checkpoint: str, address: str | None, *, is_opened: bool) -> None:
    """Serve a checkpoint, whether its job runs or not, until Ctrl-C."""
    store = open_checkpoint(checkpoint)
    settings = serve_settings(address)
    from cairn.web.server import serve
    from cairn.web.site import Site

    with serve(Site(store.url, settings, store=store)) as served, _Ended() as ended:
        typer.echo(f"dashboard of {store.url}\n  {served.url}\nCtrl-C stops it")
        if is_opened:
            webbrowser.open(served.url)
        # In slices: Python handles signals between them.
        while not ended.wait(_POLL_S):
            pass


class _Ended(threading.Event):
    """Set by Ctrl-C and SIGTERM."""

    def __enter__(self) -> _Ended:
        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.set()
