"""The settings of the HTTP server of a job.

Always true here:
- clients on other machines need a token;
- a token is never shown: not in a repr, not in an error.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from cairn.errors import PlanError

DEFAULT_ADDRESS: Final = "127.0.0.1:0"
TOKEN_CHARS_MIN: Final = 16
PORT_MAX: Final = 65535


@dataclass(frozen=True)
class Serve:
    """Settings of `job.start(serve=...)` and `cairn dashboard`.

    `address` is HOST:PORT, with port 0 for any free one. With `token`, every request must have
    it; it is required for addresses other than loopback ones. `control_token`, another one,
    allows requests that change the job: savepoint, rescale, stop. `tls` is (certificate, key),
    two PEM files. Behind a proxy that ends TLS, set `public_url` to its address.
    """

    address: str = DEFAULT_ADDRESS
    token: str | None = field(default=None, repr=False)
    control_token: str | None = field(default=None, repr=False)
    tls: tuple[str, str] | None = None
    flight: bool = True
    """Serve whole states by Arrow Flight too, on `flight_port` or any free port."""
    flight_port: int = 0
    requests_per_s: float = 5000.0
    """Limit for all clients together; further requests get status 429. Requests without a token
    have a separate limit: a tenth of it, at least 20."""
    public_url: str | None = None
    """The address of a proxy in front, such as `https://cairn.example`. Then its host and origin
    are accepted, and its `X-Forwarded-Proto` is used."""

    savepoints: str | None = None
    """Folder of savepoints requested over HTTP; default: `<checkpoint>-savepoints`."""

    def __post_init__(self) -> None:
        if not isinstance(self.address, str):
            raise PlanError(f"serve: an address is HOST:PORT, found {self.address!r}")
        host, port = self.host_port()
        rate = self.requests_per_s
        if not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise PlanError(f"serve: requests_per_s must be a number above 0, found {rate!r}")
        if not isinstance(self.flight_port, int) or not 0 <= self.flight_port <= PORT_MAX:
            raise PlanError(
                f"serve: flight_port must be from 0 (any) to {PORT_MAX}, found {self.flight_port!r}"
            )
        if not is_loopback(host) and self.token is None:
            raise PlanError(
                f"serve: {host}:{port} can be reached from other machines, and has no token\n"
                "  next: pass token=..., or a loopback address such as 127.0.0.1:8080"
            )
        if self.public_url is not None and public_parts(self.public_url) is None:
            raise PlanError(
                f"serve: public_url must be http(s)://HOST[:PORT], found {self.public_url!r}\n"
                "  next: give the address that browsers use, without a path"
            )
        for name in ("token", "control_token"):
            token = getattr(self, name)
            if token is not None and not _is_token(token):
                raise PlanError(
                    f"serve: {name} must be at least {TOKEN_CHARS_MIN} ASCII characters\n"
                    '  next: make one: python -c "import secrets; print(secrets.token_urlsafe())"'
                )
        if self.token is not None and self.token == self.control_token:
            raise PlanError(
                "serve: token and control_token must differ: readers may not change the job\n"
                "  next: make another one for control_token"
            )

    def host_port(self) -> tuple[str, int]:
        host, colon, port = self.address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or int(port) > PORT_MAX:
            raise PlanError(f"serve: an address is HOST:PORT, found {self.address!r}")
        return host, int(port)


def _is_token(token: object) -> bool:
    return isinstance(token, str) and len(token) >= TOKEN_CHARS_MIN and token.isascii()


def public_parts(url: str) -> tuple[str, str] | None:
    """Return scheme and HOST[:PORT] of a public address; None if it is not one."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # A port that is not a number raises.
        is_plain = parts.scheme in ("http", "https") and parts.path in ("", "/")
        if not is_plain or not parts.hostname or parts.query or parts.fragment or parts.username:
            return None
        # A default port is not part of the Host that a browser sends.
        default = 443 if parts.scheme == "https" else 80
        netloc = parts.netloc.lower()
        return parts.scheme, netloc.removesuffix(f":{default}")
    except (ValueError, AttributeError):
        return None


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def as_serve(serve: Serve | str | bool | None) -> Serve | None:
    """Return the settings for a `serve` argument: settings, an address, True for any port."""
    if serve is None or serve is False:
        return None
    if serve is True:
        return Serve()
    return serve if isinstance(serve, Serve) else Serve(address=serve)
