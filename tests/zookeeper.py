"""A real ZooKeeper from the jars of pyspark, for tests and benchmarks."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"
_JARS = (
    "zookeeper", "audience-annotations", "slf4j-api", "metrics-core", "snappy-java",
    "commons-io", "commons-cli", "netty-",
)  # fmt: skip


class ZooKeeper:
    """One server that can be stopped and started; it keeps its data until `close`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="zk"))
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]
        (self._folder / "zoo.cfg").write_text(
            f"tickTime=200\ndataDir={self._folder}/data\nclientPort={self.port}\n"
            "clientPortAddress=127.0.0.1\nadmin.enableServer=false\n"
            "4lw.commands.whitelist=ruok,srvr\nminSessionTimeout=400\n"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "java", "-Xmx64m", "-XX:+UseSerialGC", "-cp", _class_path(),
                    _MAIN, str(self._folder / "zoo.cfg"),
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
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
                link.sendall(b"ruok")
                return link.recv(4) == b"imok"
        except OSError:
            return False


def _class_path() -> str:
    import pyspark

    jars = (Path(pyspark.__file__).parent / "jars").glob("*.jar")
    return ":".join(str(jar) for jar in jars if jar.name.startswith(_JARS))
