"""The servers of a site: HTTP and Arrow Flight, on threads of the driver.

    listen    take the port and read the certificate: bad settings are refused early
    serve     answer requests
    close     let requests finish, for a moment; end the streams

Always true here:
- the port is taken before the job starts, or there is a PlanError;
- a server that fails does not stop the job.
"""

from __future__ import annotations

import socket
import ssl
import threading
from typing import TYPE_CHECKING, Final

import uvicorn

from cairn.driver.serving import Serve
from cairn.errors import PlanError
from cairn.logs import logger
from cairn.web.app import make_app
from cairn.web.connections import BoundedProtocol, BoundedSocket
from cairn.web.site import Site

if TYPE_CHECKING:
    from cairn.web.flight import FlightSite

CLOSE_S: Final = 5.0
KEEP_ALIVE_S: Final = 30


class Listening:
    """A port that is taken, and does not answer yet."""

    def __init__(self, settings: Serve) -> None:
        _check_certificate(settings)
        host, port = settings.host_port()
        self.socket = _bind(host, port, "serve")
        try:
            if settings.flight:
                # Flight takes the port itself, later: here we only check that it is free.
                _bind(host, settings.flight_port, "serve: flight_port").close()
        except PlanError:
            self.socket.close()
            raise

        port = int(self.socket.getsockname()[1])
        scheme = "http" if settings.tls is None else "https"
        self.url = f"{scheme}://{_url_host(host)}:{port}"

    def close(self) -> None:
        self.socket.close()


class Served:
    def __init__(self, site: Site, listening: Listening) -> None:
        settings = site.settings
        host = _url_host(settings.host_port()[0])
        self._site = site
        self._flight: FlightSite | None = None
        if settings.flight:
            from cairn.web.flight import FlightSite

            self._flight = FlightSite(site)
            site.flight_port = self._flight.port
        self.url = listening.url
        self.flight_url: str | None = None
        if self._flight is not None:
            scheme = "grpc+tcp" if settings.tls is None else "grpc+tls"
            self.flight_url = f"{scheme}://{host}:{self._flight.port}"
        certificate, key = settings.tls or (None, None)
        config = uvicorn.Config(
            make_app(site),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            http=BoundedProtocol,
            loop="asyncio",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(CLOSE_S),
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._run, args=(listening.socket,), daemon=True, name="cairn-web"
        )
        self._thread.start()

    def _run(self, listening: socket.socket) -> None:
        try:
            self._server.run(sockets=[listening])
        except BaseException:
            logger.exception("the web server has failed; the job continues without it")
        finally:
            listening.close()

    def close(self) -> None:
        self._site.close()
        self._server.should_exit = True
        if self._flight is not None:
            self._flight.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S * 2)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(site: Site, listening: Listening | None = None) -> Served:
    """Start a server; it answers requests until it is closed."""
    listening = listening or Listening(site.settings)
    try:
        return Served(site, listening)
    except BaseException:
        listening.close()
        raise


def _bind(host: str, port: int, what: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = BoundedSocket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise PlanError(
            f"{what}: cannot listen on {host}:{port}: {error.strerror or error}\n"
            "  next: use another address, or port 0 for any free one"
        ) from None
    return found


def _check_certificate(settings: Serve) -> None:
    if settings.tls is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*settings.tls)
    except (OSError, ssl.SSLError) as error:
        raise PlanError(
            f"serve: cannot load the certificate and key: {error}\n"
            "  expected: tls=(certificate, key), two PEM files that belong together"
        ) from None


def _url_host(host: str) -> str:
    """Return a name to connect to: the machine's name if the host stands for all addresses."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
