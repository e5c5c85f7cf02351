"""Start Spark's JVM, and do what can be done meanwhile.

A start is work of one core for the most part: the JVM loads classes. Meanwhile Python loads what a
run needs, the nursery loads what slots need, and then a query of one row makes Spark load what the
first epoch needs and start its Python workers, while the program is still building its job.

Always true here:
- nothing depends on what is done ahead: where it fails, it is done again when it is needed;
- a JVM that does not start with an archive of classes is started without it;
- no call to the JVM is cut in two by Ctrl-C: other threads make it, or Ctrl-C is held back.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cairn.driver import progress
from cairn.driver.class_archive import (
    JVM_VARIABLES,
    Archive,
    find_archive,
    make_in_background,
)
from cairn.driver.interrupts import call_aside, hold_interrupts
from cairn.driver.spark_noise import Relay
from cairn.logs import logger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC\b")
_NEEDED_BY_RUNS: Final = ("cairn.run", "cairn.driver.spark_driver", "pandas")
_CONNECT: Final = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_API_MODE")


def start_session(settings: Mapping[str, str], java: str, *, is_quiet: bool) -> SparkSession:
    """Return a session with these settings; start Spark if it does not run yet."""
    from pyspark import SparkContext

    is_ours = (
        SparkContext._gateway is None
        and "PYSPARK_GATEWAY_PORT" not in os.environ
        and not any(name in os.environ for name in _CONNECT)
        and "spark.remote" not in settings
    )
    if not is_ours:
        return _get_or_create(settings)
    progress.say("starting Spark")
    settings = dict(settings)
    is_local = _is_local(settings)
    if is_local:
        # Files of shuffles are read where they are written: to compress them only takes time.
        settings.setdefault("spark.shuffle.compress", "false")
        settings[_JAVA_OPTIONS] = choose_collector(settings)
    # Ahead of need only with what is certain to be needed: the Python that slots will run on.
    is_same_python = is_local and _is_our_python(os.environ.get("PYSPARK_PYTHON", ""))
    if is_same_python:
        settings.setdefault("spark.python.daemon.module", "cairn.worker.daemon")
    archive = _archive(settings, java) if is_local else None
    launched = _Launch(settings, archive, is_quiet=is_quiet)
    for name in _NEEDED_BY_RUNS:
        importlib.import_module(name)
    launched.wait()
    if is_same_python:
        _start_nursery(launched.pid)
    spark = call_aside(partial(_get_or_create, settings))
    launched.is_up()
    context = spark.sparkContext
    with hold_interrupts():
        # The thread that has started Spark is not this one, where a session is to be found.
        context._jvm.SparkSession.setActiveSession(spark._jsparkSession)
        progress.say(f"Spark {spark.version} is up on {context.master}")
    if is_local:
        threading.Thread(target=_warm_up, args=(spark,), daemon=True, name="cairn-warm-up").start()
        if archive is not None:
            atexit.register(make_in_background, archive)
    return spark


def choose_collector(settings: Mapping[str, str]) -> str:
    """Return the options of the JVM, with the parallel collector unless another one is chosen.

    Rows live for one batch. G1 pays at every write of a reference to keep pauses short, which
    nothing here needs; the parallel collector takes about a tenth less CPU time.
    """
    given = settings.get(_JAVA_OPTIONS, "")
    chosen = [given, settings.get("spark.driver.defaultJavaOptions", ""), _spark_defaults()]
    chosen += [os.environ.get(name, "") for name in JVM_VARIABLES]
    # A JVM does not start with two of them.
    if any(_COLLECTOR.search(options) for options in chosen):
        return given
    return f"{given} -XX:+UseParallelGC".strip()


def _spark_defaults() -> str:
    """Return the text of spark-defaults.conf, which may have options for the JVM."""
    try:
        return (_conf_folder() / "spark-defaults.conf").read_text(errors="replace")
    except OSError:
        return ""


def _conf_folder() -> Path:
    from pyspark.find_spark_home import _find_spark_home

    return Path(os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home()) / "conf")


def _is_local(settings: Mapping[str, str]) -> bool:
    """True if the executor will be the JVM that is started here; False where that is not sure."""
    master = settings.get("spark.master")
    if master is not None:
        return master == "local" or master.startswith("local[")
    is_set = "MASTER" in os.environ or "PYSPARK_SUBMIT_ARGS" in os.environ
    return not is_set and not (_conf_folder() / "spark-defaults.conf").exists()


def _is_our_python(python: str) -> bool:
    # Not the real path: the Python of a virtual environment is a link to that of the machine.
    return os.path.abspath(shutil.which(python) or python) == os.path.abspath(sys.executable)


def _get_or_create(settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _archive(settings: Mapping[str, str], java: str) -> Archive | None:
    from pyspark.find_spark_home import _find_spark_home

    try:
        return find_archive(java, Path(_find_spark_home()) / "jars", settings)
    except Exception:
        logger.warning("no archive of classes is used", exc_info=True)
        return None


class _Launch:
    """The JVM on its way up, on a thread of its own."""

    def __init__(
        self, settings: Mapping[str, str], archive: Archive | None, *, is_quiet: bool
    ) -> None:
        self._settings = settings
        self._archive = archive
        self._relay: Relay | None = None
        self._is_quiet = is_quiet
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.pid = 0
        threading.Thread(target=self._run, daemon=True, name="cairn-jvm").start()

    def wait(self) -> None:
        """Until the JVM takes calls; raises why it does not."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def is_up(self) -> None:
        """Spark is up: what the JVM prints from now on is all shown."""
        if self._relay is not None:
            self._relay.pass_everything()

    def _run(self) -> None:
        try:
            archive = self._archive
            if archive is not None and archive.exists:
                options = f"{self._settings.get(_JAVA_OPTIONS, '')} {archive.options}"
                try:
                    self._launch({**self._settings, _JAVA_OPTIONS: options.strip()})
                    archive.mark_used()
                    return
                except Exception:
                    archive.remove()
            self._launch(self._settings)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _launch(self, settings: Mapping[str, str]) -> None:
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway

        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        self._relay = Relay() if self._is_quiet else None
        given = {} if self._relay is None else {"stderr": self._relay.pipe}
        try:
            gateway = launch_gateway(conf, given)
        except BaseException:
            if self._relay is not None:
                self._relay.finish()
            raise
        if self._relay is not None:
            self._relay.close_pipe()
        self.pid = gateway.proc.pid
        SparkContext._ensure_initialized(gateway=gateway)


def _start_nursery(jvm: int) -> None:
    """Start the process that slots are forked from: it loads modules while Spark starts."""
    from cairn.slot.process import start_nursery

    with contextlib.suppress(Exception):
        start_nursery(jvm)


def _warm_up(spark: Any) -> None:
    """Have one row go the way of an epoch's rows, through a Python worker."""

    def same(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    with contextlib.suppress(Exception):
        session = spark.newSession()
        session.sparkContext.setJobDescription("cairn: warm-up")
        session.range(1).mapInArrow(same, "id long").collect()
