"""Driver programs that run on the Spark of the tests instead of starting one.

    python -m tests.spark.attached MODULE-OR-FILE.py ARGUMENTS…

A JVM of its own costs a program several times as much as its epochs do. A driver that attaches is
a process like any other: it has its own Spark session and its own streaming queries, and it can
be killed. Where the JVM must die with it, a program starts its own.

Always true here:
- the session of the tests goes on, whatever a program does and however it ends;
- a program that has ended leaves no streaming query and no slot behind.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from cairn.slot.folders import living_slots, run_folder

SESSION = "session"
"""Name of the session that is made for the program, on its gateway."""
NOTED = "TESTS_RUNS_NOTED"
"""Names the file where a program writes the ids of its runs."""


class Attachment:
    """A gateway for one program into the JVM of a session."""

    def __init__(self, spark: Any) -> None:
        jvm = spark.sparkContext._jvm
        self._session = spark._jsparkSession.newSession()
        self._server = jvm.org.apache.spark.api.python.Py4JServer(spark.sparkContext._conf._jconf)
        self._server.start()
        self._server.server().getJavaServer().getGateway().putObject(SESSION, self._session)
        handle, noted = tempfile.mkstemp(prefix="runs-")
        os.close(handle)
        self._noted = Path(noted)
        self.environment = {
            "PYSPARK_GATEWAY_PORT": str(self._server.getListeningPort()),
            "PYSPARK_GATEWAY_SECRET": self._server.secret(),
            NOTED: noted,
        }

    def close(self) -> None:
        """End what the program has left, as the end of a JVM would."""
        if self._server is None:
            return
        for query in self._session.streams().active():
            query.stop()
        self._server.shutdown()
        self._server = None
        for run_id in self._noted.read_text().split():
            for slot in living_slots(run_folder(run_id)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slot.process.pid, signal.SIGKILL)
        self._noted.unlink()


def attach() -> None:
    """Make the session that waits on the gateway the one that `cairn.session` returns."""
    from py4j.java_gateway import JavaObject
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    gateway = launch_gateway()
    running = gateway.jvm.JavaSparkContext(gateway.jvm.org.apache.spark.SparkContext.getOrCreate())
    conf = SparkConf(_jconf=running.getConf())
    context = SparkContext(gateway=gateway, jsc=running, conf=conf)
    session = SparkSession(context, JavaObject(SESSION, gateway._gateway_client))

    def stop() -> None:
        for query in session.streams.active:
            query.stop()

    session.stop = stop
    SparkSession._instantiatedSession = session


def note_runs() -> None:
    """Write down the id of each run before it starts a slot."""
    from cairn.driver import start

    new_id = start.new_id  # type: ignore[attr-defined]

    def noted() -> str:
        run_id = new_id()
        with open(os.environ[NOTED], "a") as file:
            file.write(f"{run_id}\n")
        return run_id

    start.new_id = noted  # type: ignore[attr-defined]


if __name__ == "__main__":
    attach()
    note_runs()
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
