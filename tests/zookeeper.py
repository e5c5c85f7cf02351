"""A real ZooKeeper from the jars of pyspark, for tests and benchmarks."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"
_QUORUM_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_JARS = (
    "zookeeper", "audience-annotations", "slf4j-api", "metrics-core", "snappy-java",
    "commons-io", "commons-cli", "netty-",
)  # fmt: skip


class ZooKeeper:
    """One server that can be stopped and started; it keeps its data until `close`."""

    def __init__(self, *, port: int | None = None, quorum: list[str] | None = None) -> None:
        """`quorum` has the lines of zoo.cfg about all servers of an ensemble, this one's first."""
        self._folder = Path(tempfile.mkdtemp(prefix="zk"))
        self.port = port or free_port()
        self._main = _MAIN if quorum is None else _QUORUM_MAIN
        (self._folder / "data").mkdir()
        if quorum is not None:
            number = quorum[0].partition("=")[0].removeprefix("server.")
            (self._folder / "data" / "myid").write_text(number)
        (self._folder / "zoo.cfg").write_text(
            f"tickTime=200\ndataDir={self._folder}/data\nclientPort={self.port}\n"
            "clientPortAddress=127.0.0.1\nadmin.enableServer=false\ninitLimit=50\nsyncLimit=10\n"
            "4lw.commands.whitelist=ruok,srvr\nminSessionTimeout=400\nmaxSessionTimeout=60000\n"
            + "\n".join(quorum or [])
        )
        self._process: subprocess.Popen[bytes] | None = None
        if quorum is None:
            self.start()

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it serves clients."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "java", "-Xmx64m", "-XX:+UseSerialGC", "-cp", _class_path(),
                    self._main, str(self._folder / "zoo.cfg"),
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait_ready(self) -> None:
        assert self._process is not None, "launched"
        deadline_s = time.monotonic() + 60
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError((self._folder / "log").read_text()[-3000:])
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                link.sendall(b"srvr")
                return b"Mode:" in link.recv(4096)
        except OSError:
            return False


class Ensemble:
    """Three servers that elect a leader among themselves."""

    def __init__(self) -> None:
        lines = [
            f"server.{number}=127.0.0.1:{free_port()}:{free_port()}:participant;"
            f"127.0.0.1:{free_port()}"
            for number in (1, 2, 3)
        ]
        self.servers = [
            ZooKeeper(
                port=int(line.rpartition(":")[2]),
                quorum=[line, *(each for each in lines if each != line)],
            )
            for line in lines
        ]
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait_ready()

    @property
    def hosts(self) -> str:
        return ",".join(server.hosts for server in self.servers)

    def close(self) -> None:
        for server in self.servers:
            server.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _class_path() -> str:
    import pyspark

    jars = (Path(pyspark.__file__).parent / "jars").glob("*.jar")
    return ":".join(str(jar) for jar in jars if jar.name.startswith(_JARS))
