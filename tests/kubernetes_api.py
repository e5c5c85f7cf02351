"""The leases of a Kubernetes API, over HTTP in this process, with faults on demand.

It keeps what leadership depends on: a version that every write changes, replacements on the
condition of that version, creation that fails if the object exists. It is not a cluster.

Always true here:
- a request is applied whole or not at all, one after the other;
- "lost" applies the request and closes the connection instead of answering.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_ROOT = "/apis/coordination.k8s.io/v1/namespaces/"


class KubernetesApi:
    """An API server that can be stopped and started; it keeps its leases."""

    def __init__(self) -> None:
        self.leases: dict[tuple[str, str], dict[str, Any]] = {}
        self.delay_s = 0.0
        """Each answer comes this much later."""
        self.holders: list[str] = []
        """The holders of all leases that have no labels, as they changed."""
        self.requests: list[str] = []
        self._faults: list[tuple[str, int | str]] = []
        self._version = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                # A connection that was kept open must not outlive a server that was stopped.
                if api._server is not server:
                    self.close_connection = True
                    return
                super().handle_one_request()

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                fault = api._take_fault(self.command)
                if api._server is not server or fault == "unreachable":
                    self.close_connection = True
                    return
                if isinstance(fault, int):
                    status, answer = fault, {"kind": "Status", "code": fault}
                else:
                    with api._lock:
                        status, answer = api._apply(self.command, self.path, body)
                time.sleep(api.delay_s)
                if fault == "lost" or api._server is not server:
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # A client that went away.

        server = Server(("127.0.0.1", self.port), Handler)
        self.port = server.server_address[1]
        self._server = server
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, and answer no request any more."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    close = stop

    def fail(self, method: str, fault: int | str, times: int = 1) -> None:
        """Let the next requests of a method fail: a status, "lost" or "unreachable"."""
        self._faults += [(method, fault)] * times

    def write_kubeconfig(self, path: Path, *, port: int | None = None) -> Path:
        """Write a kubeconfig of this server, with the namespace `jobs`."""
        server = f"http://127.0.0.1:{port or self.port}"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": {"server": server}}],
                    "users": [{"name": "test", "user": {"token": "secret"}}],
                    "contexts": [
                        {
                            "name": "test",
                            "context": {"cluster": "test", "user": "test", "namespace": "jobs"},
                        }
                    ],
                }
            )
        )
        return path

    def _take_fault(self, method: str) -> int | str | None:
        with self._lock:
            for index, (wanted, fault) in enumerate(self._faults):
                if wanted == method:
                    del self._faults[index]
                    return fault
        return None

    def _apply(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        url = urlsplit(target)
        assert url.path.startswith(_ROOT), url.path
        namespace, kind, *names = url.path.removeprefix(_ROOT).split("/")
        assert kind == "leases", url.path
        self.requests.append(f"{method} {'/'.join(names)}")
        if method == "POST":
            names = [body["metadata"]["name"]]
        if not names:
            label = parse_qs(url.query).get("labelSelector", [""])[0]
            return 200, {"kind": "LeaseList", "items": self._list(namespace, label)}
        key = (namespace, names[0])
        found = self.leases.get(key)
        if method == "POST":
            return self._error(409) if found else self._store(key, body, 201)
        if method == "PUT":
            given = body["metadata"].get("resourceVersion")
            if found is None:
                # As Kubernetes: a PUT may create a lease, but not with a version.
                return self._error(500) if given else self._store(key, body, 201)
            if not given:
                return self._error(422)
            current = found["metadata"]["resourceVersion"]
            return self._error(409) if given != current else self._store(key, body, 200)
        if found is None:
            return self._error(404)
        if method == "DELETE":
            del self.leases[key]
        return 200, found

    def _store(
        self, key: tuple[str, str], body: dict[str, Any], status: int
    ) -> tuple[int, dict[str, Any]]:
        self._version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}
        self.leases[key] = {**body, "metadata": metadata}
        holder = body["spec"].get("holderIdentity", "")
        if "labels" not in metadata and self.holders[-1:] != [holder]:
            self.holders.append(holder)
        return status, self.leases[key]

    def _list(self, namespace: str, label: str) -> list[dict[str, Any]]:
        name, _, value = label.partition("=")
        return [
            lease
            for (place, _), lease in self.leases.items()
            if place == namespace and lease["metadata"].get("labels", {}).get(name) == value
        ]

    def _error(self, status: int) -> tuple[int, dict[str, Any]]:
        return status, {"kind": "Status", "status": "Failure", "code": status}
