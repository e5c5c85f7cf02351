"""A Spark standalone cluster on hosts of its own, with an S3 server that all of them reach.

    with Cluster(folder) as cluster:
        cluster.add_worker("w1")
        with cluster.program("ledger", …) as program: …

The driver is on a host too. The process 1 of a worker made with `is_first` is its JVM, as in a
container without an init. Files of input and output are in a folder that all hosts have;
the checkpoint is in a bucket, and no jar that could reach a bucket is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from pyspark.find_spark_home import _find_spark_home

from cairn.java import find_java
from tests.cluster.hosts import ROOT, Host, Hosts
from tests.s3 import S3, s3_server
from tests.spark.support import Program, eventually

MASTER_PORT = 7077
LOST_S = 15
"""A worker or an executor that is not heard of for so long is lost."""
SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.executor.heartbeatInterval": "1s",
    "spark.network.timeout": f"{LOST_S}s",
    "spark.storage.blockManagerHeartbeatTimeoutMs": f"{LOST_S * 1000}",
    "spark.network.timeoutInterval": "1s",
    "spark.rpc.askTimeout": f"{LOST_S}s",
    "spark.shuffle.io.maxRetries": "1",
    "spark.shuffle.io.retryWait": "1s",
    # An executor on a host that is cut off is found by its first failed connection.
    "spark.shuffle.io.connectionTimeout": f"{LOST_S}s",
    "spark.task.maxFailures": "8",
}


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            self.hosts = stack.enter_context(Hosts(self.folder))
            self.s3: S3 = stack.enter_context(s3_server(host=self.hosts.address))
            self.hosts.environment |= self._environment() | self.s3.env
            self.master = self.hosts.add("master")
            self.url = f"spark://{self.master.address}:{MASTER_PORT}"
            command = [_spark_class(), "org.apache.spark.deploy.master.Master"]
            command += ["--host", self.master.address, "--port", str(MASTER_PORT)]
            self.master.run([*command, "--webui-port", "0"])
            self._await_port(self.master.address, MASTER_PORT)
            self.driver = self.hosts.add("driver")
            self._ended = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.close()

    def _environment(self) -> dict[str, str]:
        """What every process of the cluster has: none of it is a path on one host alone."""
        find_java()  # It sets JAVA_HOME where the machine has no Java.
        home = os.environ.get("JAVA_HOME")
        return {
            **({"JAVA_HOME": home} if home else {}),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(_find_spark_home()),
            "TMPDIR": "/tmp",
            "SPARK_LOCAL_DIRS": "/tmp",
            "SPARK_SUBMIT_OPTS": "",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": (
                f"-Dspark.worker.timeout={LOST_S} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
            ),
            "CAIRN_RUNTIME_DIR": "/tmp/cairn",
        }

    def add_worker(
        self, name: str, *, cores: int = 1, is_first: bool = False, **environment: str
    ) -> Host:
        """Add a host with a worker. With `is_first` its JVM is the process 1 of the host."""
        address = self.hosts.next_address()
        command = [_spark_class(), "org.apache.spark.deploy.worker.Worker"]
        command += ["--cores", str(cores), "--memory", f"{cores}g", "--host", address]
        command += ["--webui-port", "0", "--work-dir", "/tmp/work", self.url]
        host = self.hosts.add(name, first=command if is_first else None)
        assert host.address == address
        if is_first:
            # Spark's script looks for Java, and then becomes the JVM.
            assert eventually(lambda: host.first.name() == "java", within_s=60), "no JVM"
        else:
            host.run(command, env=environment)
        return host

    @contextlib.contextmanager
    def worker_in(self, name: str, image: Mapping[str, Path], spark_home: str) -> Iterator[Host]:
        """A host of two cores, with a worker that sees an image only, for a while."""
        address = self.hosts.next_address()
        command = [f"{spark_home}/bin/spark-class", "org.apache.spark.deploy.worker.Worker"]
        command += ["--cores", "2", "--memory", "2g", "--host", address]
        command += ["--webui-port", "0", "--work-dir", "/tmp/work", self.url]
        own = {"SPARK_HOME": spark_home, "PYTHONPATH": "", "PYSPARK_PYTHON": ""}
        host = self.hosts.add(name, command, image=image, environment=own)
        try:
            yield host
        finally:
            self.lose(host)

    @contextlib.contextmanager
    def worker(self, name: str, **environment: Any) -> Iterator[Host]:
        """A host with a worker, for a while."""
        host = self.add_worker(name, **environment)
        try:
            yield host
        finally:
            # The master sees a closed connection at once, and the loss of a host much later.
            for process in host.running("java"):
                process.kill()
            self.lose(host)

    def lose(self, host: Host) -> None:
        """End all processes of a host; nothing if it is lost already."""
        if self.hosts.hosts.pop(host.name, None) is not None:
            host.kill()

    @property
    def workers(self) -> list[Host]:
        return [h for n, h in self.hosts.hosts.items() if n not in ("master", "driver")]

    def executors(self, host: Host) -> list[psutil.Process]:
        """Return the JVMs of executors on a host."""
        return host.running("java", "CoarseGrainedExecutorBackend")

    def slots(self, host: Host) -> list[psutil.Process]:
        return [process for process in host.processes() if process.name().startswith("cairn-slot")]

    def program(
        self,
        module: str,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        **conf: str,
    ) -> Program:
        """Start a driver program of tests/spark/programs on the driver's host."""
        settings = SETTINGS | {
            "spark.driver.host": self.driver.address,
            "spark.driver.bindAddress": self.driver.address,
            **conf,
        }
        given = [f"{name}={value}" for name, value in settings.items()]
        return Program(
            module,
            *arguments,
            "--master",
            self.url,
            "--conf",
            *given,
            run=self.driver.run,
            **(environment or {}),
        )

    @staticmethod
    def interrupt(program: Program) -> None:
        """Send Ctrl-C to a program; the process that we have started only waits for it."""
        (driver,) = psutil.Process(program.process.pid).children()
        driver.send_signal(signal.SIGINT)

    @staticmethod
    def _await_port(address: str, port: int) -> None:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
                return
            assert time.monotonic() < deadline, f"nothing listens at {address}:{port}"
            time.sleep(0.1)


def _spark_class() -> str:
    """Spark's program that becomes a JVM with the options that Spark needs."""
    return str(Path(_find_spark_home()) / "bin" / "spark-class")
