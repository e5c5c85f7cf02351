"""An imitation of WebHDFS over a local folder, for Hadoop's own client.

The jars of Hadoop that Spark brings lack a class that its WebHDFS client needs. `missing_class()`
is a folder with a stand-in, for CLASSPATH; it is compiled once, by the compiler that Spark brings.

    with WebHdfs(folder) as server:
        server.url("name")                 webhdfs://127.0.0.1:<port>/name
        server.drop_before["CREATE"] = 2   the next two requests are not answered, and do nothing
        server.drop_after["RENAME"] = 1    the next one is done, and its answer is lost
        server.is_racy = True              a rename looks at its target first, and renames later
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

_CLASSES_FOLDER: Final = Path(__file__).parents[1] / "build" / "webhdfs-classes"
_RS: Final = "org.apache.hadoop.shaded.javax.ws.rs"
_MISSING: Final = """
package org.apache.hadoop.shaded.org.glassfish.jersey.internal;

import RS.core.*;
import RS.ext.RuntimeDelegate;

public class RuntimeDelegateImpl extends RuntimeDelegate {
    public RuntimeDelegate.HeaderDelegate createHeaderDelegate(Class type) {
        return new RuntimeDelegate.HeaderDelegate() {
            public Object fromString(String text) {
                String[] parts = text.split(";")[0].trim().split("/");
                return new MediaType(parts[0], parts[1]);
            }
            public String toString(Object value) { return value.getClass().getName(); }
        };
    }
    public UriBuilder createUriBuilder() { return null; }
    public Response.ResponseBuilder createResponseBuilder() { return null; }
    public Variant.VariantListBuilder createVariantListBuilder() { return null; }
    public Link.Builder createLinkBuilder() { return null; }
    public Object createEndpoint(Application application, Class type) { return null; }
}
"""
_PREFIX: Final = "/webhdfs/v1"
_CLASSES: Final[dict[type[Exception], tuple[str, int]]] = {
    FileNotFoundError: ("java.io.FileNotFoundException", 404),
    FileExistsError: ("org.apache.hadoop.fs.FileAlreadyExistsException", 403),
    PermissionError: ("org.apache.hadoop.security.AccessControlException", 403),
}


def missing_class() -> str:
    """Return the folder for CLASSPATH."""
    if not _CLASSES_FOLDER.is_dir():
        from cairn.storage.hadoop_jvm import connect

        compiler = connect().gateway.jvm.org.codehaus.janino.SimpleCompiler()
        compiler.cook(_MISSING.replace("RS", _RS))
        _CLASSES_FOLDER.parent.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=_CLASSES_FOLDER.parent))
        for name, code in compiler.getBytecodes().items():
            file = folder / f"{name.replace('.', '/')}.class"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(code))
        with contextlib.suppress(OSError):  # Another lane of the tests was faster.
            folder.rename(_CLASSES_FOLDER)
    return str(_CLASSES_FOLDER)


class WebHdfs:
    """One server, on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drop_before: Counter[str] = Counter()
        self.drop_after: Counter[str] = Counter()
        self.refused: set[str] = set()
        """Paths that nobody may write to."""
        self.is_racy = False
        self.requests: list[str] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.port = self._server.server_address[1]

    def __enter__(self) -> WebHdfs:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, name: str) -> str:
        return f"webhdfs://127.0.0.1:{self.port}/{name}"

    def takes(self, wanted: Counter[str], operation: str) -> bool:
        with self._lock:
            wanted[operation] -= 1
            return wanted[operation] >= 0

    # The operations: each returns the answer.

    def getfilestatus(self, path: Path, given: dict[str, str]) -> Any:
        return {"FileStatus": _status(path, "")}

    def liststatus_batch(self, path: Path, given: dict[str, str]) -> Any:
        names = sorted(os.listdir(path)) if path.is_dir() else [""]
        path.stat()
        entries = [_status(path / name, name) for name in names]
        listing = {"FileStatuses": {"FileStatus": entries}}
        return {"DirectoryListing": {"partialListing": listing, "remainingEntries": 0}}

    def mkdirs(self, path: Path, given: dict[str, str]) -> Any:
        path.mkdir(parents=True, exist_ok=True)
        return {"boolean": True}

    def delete(self, path: Path, given: dict[str, str]) -> Any:
        if not path.exists():
            return {"boolean": False}
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {"boolean": True}

    def rename(self, path: Path, given: dict[str, str]) -> Any:
        target = self.folder / given["destination"].lstrip("/")
        for needed in (path, target.parent):
            needed.stat()
        if "OVERWRITE" in given["renameoptions"]:
            path.replace(target)
        elif self.is_racy:
            if target.exists():
                raise FileExistsError(f"rename destination {target} already exists")
            time.sleep(0.2)
            path.replace(target)
        else:
            os.link(path, target)
            path.unlink()
        return None

    def create(self, path: Path, given: dict[str, str], data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb" if given.get("overwrite") == "true" else "xb") as file:
            file.write(data)

    def open(self, path: Path, given: dict[str, str]) -> bytes:
        start = int(given.get("offset", "0"))
        length = int(given["length"]) if "length" in given else None
        data = path.read_bytes()[start:]
        return data if length is None else data[:length]


def _status(path: Path, name: str) -> dict[str, Any]:
    found = path.stat()
    return {
        "accessTime": 0, "blockSize": 1 << 27, "childrenNum": 0, "fileId": found.st_ino,
        "group": "g", "length": 0 if path.is_dir() else found.st_size,
        "modificationTime": int(found.st_mtime * 1000), "owner": "o", "pathSuffix": name,
        "permission": "755", "replication": 1, "storagePolicy": 0,
        "type": "DIRECTORY" if path.is_dir() else "FILE",
    }  # fmt: skip


def _handler(server: WebHdfs) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            # Hadoop's client sends letters beyond ASCII as they are.
            parts = urlsplit(self.path.encode("latin-1").decode())
            given = {name: values[0] for name, values in parse_qs(parts.query).items()}
            operation = given["op"].upper()
            name = unquote(parts.path.removeprefix(_PREFIX))
            data = self._body()
            server.requests.append(operation)
            if operation in ("CREATE", "OPEN") and "here" not in given:
                where = f"http://127.0.0.1:{server.port}{quote(unquote(parts.path))}"
                self._answer(307, b"", ("Location", f"{where}?{parts.query}&here=1"))
                return
            if server.takes(server.drop_before, operation):
                self.close_connection = True
                return
            try:
                path = server.folder / name.lstrip("/")
                if name in server.refused:
                    raise PermissionError(f"Permission denied: {name}")
                if operation == "CREATE":
                    server.create(path, given, data)
                    status, answer = 201, b""
                elif operation == "OPEN":
                    status, answer = 200, server.open(path, given)
                else:
                    result = getattr(server, operation.lower())(path, given)
                    status, answer = 200, b"" if result is None else json.dumps(result).encode()
            except Exception as error:
                status, answer = self._error(error)
            if server.takes(server.drop_after, operation):
                self.close_connection = True
                return
            self._answer(status, answer)

        do_GET = do_PUT = do_POST = do_DELETE = _do  # noqa: N815

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def _error(self, error: Exception) -> tuple[int, bytes]:
            java, status = _CLASSES.get(type(error), ("java.io.IOException", 500))
            described = {
                "exception": java.rpartition(".")[2],
                "javaClassName": java,
                "message": str(error),
            }
            return status, json.dumps({"RemoteException": described}).encode()

        def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            # The client takes the kind of the body for the kind of the answer.
            is_data = bool(body) and not body.startswith(b'{"')
            self.send_header(
                "Content-Type", "application/octet-stream" if is_data else "application/json"
            )
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
